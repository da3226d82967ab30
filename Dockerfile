# docker build -t meshwright .                                        CPU: plans for any cluster
# docker build -t meshwright --build-arg EXTRAS=cuda12 .              NVIDIA GPUs (needs the NVIDIA Container Toolkit)
# docker run --rm -v "$PWD":/work meshwright planner inspect train.py --cluster h100:8
ARG PYTHON=3.13
FROM python:${PYTHON}-slim

ARG EXTRAS=""
COPY . /src
RUN pip install --no-cache-dir "/src${EXTRAS:+[${EXTRAS}]}" && rm -rf /src && \
    useradd --create-home user
USER user
WORKDIR /work
CMD ["planner", "--help"]
