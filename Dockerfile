# The image of a run. ACCELERATOR is tpu, cuda or cpu; EXTRAS are more of pyproject.toml: data,gcs.
#
#   docker build --build-arg ACCELERATOR=cpu --tag torus .
#   docker run --rm torus --config configs/tp8.yaml
FROM python:3.12-slim

ARG ACCELERATOR=tpu
ARG EXTRAS=""

# The user writes .cache/ and runs/ here when they are not mounted.
RUN useradd --create-home --uid 1000 torus && install --directory --owner=torus /app
WORKDIR /app

# Before the code, so that a change of the code does not install the libraries again. The packages
# may be missing here, because train.py imports them from its own folder.
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
RUN case "$ACCELERATOR" in \
        cpu) extras="$EXTRAS" ;; \
        tpu|cuda) extras="$ACCELERATOR${EXTRAS:+,$EXTRAS}" ;; \
        *) echo "ACCELERATOR=$ACCELERATOR is none of tpu, cuda, cpu" >&2; exit 2 ;; \
    esac \
    && pip install --no-cache-dir --constraint constraints/python3.12.txt --editable ".${extras:+[$extras]}"
# A clone may be readable for its owner alone.
COPY --chown=torus . .

# Logs of a pod appear line by line.
ENV PYTHONUNBUFFERED=1
USER torus
ENTRYPOINT ["python", "train.py"]
