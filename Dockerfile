# SPDX-License-Identifier: Apache-2.0
#
# One binary with its libraries, on a base without anything else added. The same image serves on
# GPUs if it is given some, and otherwise on the CPU: deploy/containers.md.
#
#   docker build -t attend .
#   docker run --rm -p 127.0.0.1:8001:8001 -p 127.0.0.1:8002:8002 attend --insecure
#
# ATTEND_CUDA=OFF leaves the CUDA kernels out: it builds in less than half the time.
# Nothing of NVIDIA's need be installed: the compiler comes from PyPI, the driver from the machine.
ARG BASE_IMAGE=debian:bookworm-slim

FROM ${BASE_IMAGE} AS build
# A compiler cache takes objects of the same language only.
ENV LANG=C.UTF-8
WORKDIR /src
ARG ATTEND_CUDA=ON
# The packages first: they change less often than the sources, so this layer stays cached.
COPY deploy/install-deps deploy/cuda-requirements.txt deploy/
RUN deploy/install-deps build $([ "$ATTEND_CUDA" = OFF ] || echo cuda) \
    && rm -rf /var/lib/apt/lists/*
COPY . .
ARG CMAKE_BUILD_PARALLEL_LEVEL
RUN cmake -S . -B build/image -G Ninja -DCMAKE_BUILD_TYPE=Release -DATTEND_CUDA=${ATTEND_CUDA} \
      -DATTEND_PCH=ON -DATTEND_TESTS=OFF -DATTEND_BENCH=OFF \
      -DATTEND_DIST_DIR=/opt/attend \
    && cmake --build build/image --target dist

FROM ${BASE_IMAGE}
COPY --from=build /opt/attend /opt/attend
# Addresses inside the container; what is published is the runner's choice, and so is how callers
# are known: the server does not start without --tls-cert or --insecure. ATTEND_SERVER is where the
# health check asks: change it with ATTEND_LISTEN.
ENV PATH=/opt/attend/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ATTEND_LISTEN=0.0.0.0:8001 \
    ATTEND_METRICS_LISTEN=0.0.0.0:8002 \
    ATTEND_SERVER=127.0.0.1:8001 \
    ATTEND_LOG_FORMAT=json \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# A number, so that Kubernetes' runAsNonRoot can tell without a passwd file.
USER 10001:10001
EXPOSE 8001 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s --retries=3 \
  CMD ["/opt/attend/bin/attend-client", "info", "--health"]
ENTRYPOINT ["/opt/attend/bin/attend-server"]
