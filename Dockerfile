# syntax=docker/dockerfile:1
#
# gptmill for NVIDIA GPUs. Needs the NVIDIA Container Toolkit on the host.
#
#   docker build --tag gptmill .
#   docker run --rm --init --gpus all --shm-size 8g --volume "$PWD:/work" --volume gptmill-cache:/cache gptmill train demo
#
# Data, runs and checkpoints are in /work, the folder you are in; compiled kernels, tokenizers and downloads stay in
# the volume gptmill-cache. Files belong to user 1000; build with --build-arg UID="$(id -u)" if you are another.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /source
RUN pip install --no-cache-dir build
COPY . .
RUN python -m build --wheel --outdir /dist

FROM python:${PYTHON}-slim
ARG UID=1000
ARG EXTRAS=data,hf,cloud,wandb,trackio,eval,export
# Triton and torch.compile call a C compiler to build what they launch.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
# PyTorch's wheels from PyPI bring CUDA, cuDNN and NCCL; the driver comes from the host.
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    --mount=type=cache,target=/root/.cache/pip \
    pip install --constraint /constraints.txt "$(ls /dist/*.whl)[${EXTRAS}]"
RUN useradd --uid "${UID}" --create-home gptmill \
    && install --directory --owner gptmill --group gptmill /work /cache
ENV GPTMILL_CACHE=/cache/gptmill \
    HF_HOME=/cache/huggingface \
    TIKTOKEN_CACHE_DIR=/cache/tiktoken \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    TRITON_CACHE_DIR=/cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1
USER gptmill
VOLUME /cache
WORKDIR /work
# Ctrl-C and docker stop reach gptmill itself, which finishes the step and saves; give it time with --stop-timeout 120.
STOPSIGNAL SIGTERM
ENTRYPOINT ["gptmill"]
CMD ["doctor"]
