# Quire on an NVIDIA GPU:  docker build -f contrib/docker/cuda.Dockerfile -t quire-cuda .
#                          docker run --gpus all -p 8000:8000 -v quire-models:/models quire-cuda \
#                            serve gemma4:26b --host 0.0.0.0 --allow-anyone
# MLX's wheels bring CUDA's libraries and compiler; the host brings the driver.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
ARG CUDA=cuda13
RUN python -m venv /opt/quire && /opt/quire/bin/pip install --no-cache-dir ".[${CUDA},media]"

FROM python:3.12-slim-bookworm
# MLX compiles kernels when a model opens, with the headers of the C++ library.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 quire && install --directory --owner quire /models
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/models XDG_CACHE_HOME=/models/cache
USER 10001
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["quire"]
CMD ["serve"]
