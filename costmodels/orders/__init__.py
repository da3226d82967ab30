"""Schedules as data: per device, the order of passes; and what such an order takes."""

from costmodels.orders.deadlock import DeadlockError
from costmodels.orders.draw import drawn
from costmodels.orders.files import order_of_rows, read_order, rows_of, write_order
from costmodels.orders.named import NAMES, chunks_of, named_order
from costmodels.orders.order import Order, OrderError, Task
from costmodels.orders.simulate import Simulated, Work, simulate
from costmodels.orders.ticks import in_ticks

__all__ = [
    "NAMES",
    "DeadlockError",
    "Order",
    "OrderError",
    "Simulated",
    "Task",
    "Work",
    "chunks_of",
    "drawn",
    "in_ticks",
    "named_order",
    "order_of_rows",
    "read_order",
    "rows_of",
    "simulate",
    "write_order",
]
