# Quire on a Linux CPU:  docker build -f contrib/docker/cpu.Dockerfile -t quire .
#                        docker run -p 8000:8000 -v quire-models:/models quire serve gemma4:e4b \
#                          --host 0.0.0.0 --allow-anyone
# Without arguments it serves the embedded model inside the container.
FROM python:3.12-slim-bookworm AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
# The image may run on another processor than the one that builds it.
ENV QUIRE_BUILD_KERNELS=all
RUN python -m venv /opt/quire && /opt/quire/bin/pip install --no-cache-dir ".[cpu,media]"

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 10001 quire && install --directory --owner quire /models
COPY --from=build /opt/quire /opt/quire
ENV PATH=/opt/quire/bin:$PATH HF_HOME=/models
USER 10001
VOLUME /models
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
ENTRYPOINT ["quire"]
CMD ["serve"]
