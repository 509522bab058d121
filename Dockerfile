# syntax=docker/dockerfile:1
# The image of a node, with bench and torch:
#
#   docker build --build-arg VARIANT=cuda --build-arg COMMIT=$(git rev-parse HEAD) --tag bench:cuda .
#   docker run --rm --volume $PWD/results:/results --user $(id -u):$(id -g) bench:cuda matrix --gpus 1..2
#
# Studies are written under /results: a volume that the user of the container may write. COMMIT stands on the
# records of runs, since no .git is in the image.
#
# VARIANT is cpu, or cuda: then torch's wheels bring CUDA and NCCL along, and the host only the driver.
# Python packages are those of constraints.txt, except the nvidia-* and triton packages that torch's wheels for
# CUDA bring along: pip takes those that torch's metadata asks for. Images are pinned by version, and whoever
# must build the same bits again pins their digests.
# There is no compiler in it: studies with --compile need an image made from this one with g++ in it.
ARG VARIANT=cpu
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS venv
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python3 -m venv /opt/bench
ENV PATH=/opt/bench/bin:$PATH

COPY constraints.txt /src/

FROM venv AS torch-cpu
RUN pip install --no-cache-dir --constraint /src/constraints.txt \
    --index-url https://download.pytorch.org/whl/cpu torch

FROM venv AS torch-cuda
RUN pip install --no-cache-dir --constraint /src/constraints.txt torch

# Only the stage that is named here is built.
# hadolint ignore=DL3006
FROM torch-${VARIANT} AS build
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt '.[tensorboard]'

FROM python:${PYTHON}
# NCCL loads these libraries to use InfiniBand and RoCE, and exchanges over TCP without them. Debian's
# versions are those of the image, which is pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --no-install-recommends -y \
    libibverbs1 ibverbs-providers librdmacm1 && rm -rf /var/lib/apt/lists/*
# By number, so that Kubernetes can tell that it is not root.
RUN useradd --uid 1000 --user-group --create-home bench
COPY --from=build /opt/bench /opt/bench
ENV PATH=/opt/bench/bin:$PATH PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# By these NVIDIA's container runtime hands devices in: torch and NCCL need the driver's compute libraries, and
# NVML and nvidia-smi are in `utility`. A Python image, unlike CUDA's own, does not set them.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ARG COMMIT=
ENV BENCH_COMMIT=$COMMIT
USER 1000:1000
WORKDIR /results
ENTRYPOINT ["bench"]
