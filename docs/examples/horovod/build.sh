#!/usr/bin/env bash
# Build Horovod 0.28.1 for CPU ranks, with the torch of bench's interpreter, into an interpreter beside it:
#
#   bash docs/examples/horovod/build.sh [FOLDER]       (default: .venv-horovod)
#
# PYTHON names bench's interpreter (default: .venv/bin/python). g++, CMake 3 and about 4 minutes on 2 cores are needed.
set -euo pipefail
folder=${1:-.venv-horovod}
python=${PYTHON:-.venv/bin/python}
packages='import site; print(site.getsitepackages()[0])'

"$python" -m venv --clear "$folder"
# The new interpreter uses the packages of bench's, so that both have one torch.
"$python" -c "$packages" > "$("$folder/bin/python" -c "$packages")/bench.pth"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check "$@"; }
pip install --quiet 'setuptools<80' wheel

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
pip download --quiet --no-deps --no-binary :all: --no-build-isolation --dest "$source" horovod==0.28.1
tar --extract --gzip --strip-components 1 --directory "$source" --file "$source/horovod-0.28.1.tar.gz"
# torch's headers need C++17, and Horovod asks for C++14.
sed -i '19s/14/17/' "$source/CMakeLists.txt"
sed -i '67s/14/17/' "$source/horovod/torch/CMakeLists.txt"
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_CPU_OPERATIONS=GLOO
export HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
MAKEFLAGS=-j$(nproc) pip install --no-build-isolation "$source"
