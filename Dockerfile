# An image for `--on kubernetes`: paceline, and a user without rights. Build it in this folder:
#   docker build -t example.org/paceline:0.1 .
# Another base (CUDA's, a site's own with torch in it): docker build --build-arg BASE=… .
ARG BASE=python:3.12-slim
FROM ${BASE}
RUN if command -v apt-get >/dev/null && ! command -v openssl >/dev/null; then \
      apt-get update -qq && apt-get install -y -qq --no-install-recommends openssl && rm -rf /var/lib/apt/lists/*; fi
COPY pyproject.toml README.md LICENSE /build/
COPY paceline /build/paceline
RUN pip install --no-cache-dir /build && rm -rf /build
# a number, so that Kubernetes sees that it is not root
USER 1000
WORKDIR /tmp
ENTRYPOINT []
CMD ["paceline", "--help"]
