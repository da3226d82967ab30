"""Launchers that reach hosts: ssh, OpenMPI, Slurm, and files of hosts."""
