#!/usr/bin/env bash
# Installs what parplan needs and is missing (Debian 12, Ubuntu 24.04), configures a Release build
# in build/ and builds the program and its plugins. A second run takes seconds. Everything comes
# from the distribution's own packages; nothing else is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
  echo "usage: ./setup.sh [--tests] [--all-gpus] [options of cmake, such as --fresh or -DPARPLAN_CUDA=OFF]"
  echo "  --tests     build the tests and benchmarks, too"
  echo "  --all-gpus  compile CUDA code for every supported GPU, not only for this machine's"
}

# cmake's long options that concern how build/ is configured. Its others would configure another
# folder or do something else instead.
options_of_cmake=(
  --fresh --install-prefix --toolchain --compile-no-warning-as-error --graphviz
  --log-level --log-context --warn-uninitialized --no-warn-unused-cli --check-system-vars
  --trace --trace-expand --trace-format --trace-source --trace-redirect
  --debug-output --debug-trycompile --debug-find --debug-find-pkg --debug-find-var
  --profiling-output --profiling-format
)

tests=OFF
all_gpus=OFF
options=()
for argument in "$@"; do
  case "$argument" in
    --tests) tests=ON ;;
    --all-gpus) all_gpus=ON ;;
    -h | --help)
      usage
      exit 0
      ;;
    --*)
      if [[ " ${options_of_cmake[*]} " != *" ${argument%%=*} "* ]]; then
        echo "setup.sh: there is no option '$argument'" >&2
        usage >&2
        exit 2
      fi
      options+=("$argument")
      ;;
    *) options+=("$argument") ;;
  esac
done

# package, what it is for
packages=(
  "g++                 a C++20 compiler (g++ 12 or later, or clang 16 or later)"
  "cmake               the build (3.25 or later)"
  "ninja-build         the build"
  "libboost-dev        Boost.Graph (1.74 or later): routes through a cluster, operations in order, short lists"
  "libeigen3-dev       Eigen (3.4): matrix products on the CPU"
  "libyaml-cpp-dev     yaml-cpp (0.7 or later): models, clusters and plans"
  "nlohmann-json3-dev  nlohmann/json: Hugging Face configurations, JSON output"
  "libpugixml-dev      pugixml (1.13 or later): NCCL's topologies"
  "libfmt-dev          fmt: text"
  "libcli11-dev        CLI11: the command line"
  "libfccp-dev         Fast C++ CSV Parser: tables of published runs"
  "libxlsxwriter-dev   libxlsxwriter (1.1.4 or later): workbooks of parplan sweep"
  "libopenmpi-dev      Open MPI (4.1): ranks as processes on several machines"
)
if [ "$tests" = ON ]; then
  packages+=("doctest-dev         doctest: the tests")
fi

system=unknown
if [ -r /etc/os-release ]; then
  system=$(. /etc/os-release && echo "${ID:-unknown} ${VERSION_ID:-}")
fi
case "$system" in
  "debian 12" | "ubuntu 24.04") ;;
  *)
    {
      echo "setup.sh installs packages on Debian 12 and Ubuntu 24.04 only; this system is '$system'."
      echo "parplan needs, by the names of Debian's packages:"
      printf '  %s\n' "${packages[@]}"
      echo "With these in place, build with:"
      echo "  cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release && cmake --build build"
    } >&2
    exit 2
    ;;
esac

missing=()
for line in "${packages[@]}"; do
  package=${line%% *}
  if [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
    missing+=("$package")
  fi
done
if [ ${#missing[@]} -gt 0 ]; then
  echo "Installing ${missing[*]}"
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "setup.sh: neither root nor sudo; have an administrator run: apt-get install ${missing[*]}" >&2
      exit 2
    fi
    as_root=(sudo)
  fi
  # A list that cannot be refreshed (an unreachable third-party source) does not matter as long as
  # the packages install.
  "${as_root[@]}" apt-get update -q || echo "setup.sh: apt-get update failed; trying to install all the same" >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
fi

# A compiler of Eigen's kernels takes up to 1.5 GB: no more of them than processors and memory
# allow.
processors=$(nproc)
by_memory=$(awk '/^MemAvailable:/ {print int($2 / 1500000)}' /proc/meminfo)
jobs=$((by_memory < processors ? by_memory : processors))
jobs=$((jobs < 1 ? 1 : jobs))

generator=(-G Ninja)
if [ -f build/CMakeCache.txt ] && [[ " ${options[*]} " != *" --fresh "* ]]; then
  generator=()  # an existing build keeps its own
fi
cmake -S . -B build "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING="$tests" \
  -DPARPLAN_ALL_GPUS="$all_gpus" -DPARPLAN_UNITY_BUILD=ON "${options[@]}"
cmake --build build --parallel "$jobs"
