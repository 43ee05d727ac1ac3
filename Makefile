# llm4.c: `make help` lists the targets.
#
# Nothing is probed by compiling. What was not found is said in one line and left out; variables choose otherwise:
#   CC=clang          another compiler (gcc 12+, clang 14+)
#   CJSON_DIR=DIR     cJSON in DIR/include/cjson and DIR/lib instead of the system's
#   OPENMP=0          one thread
#   MPI_DIR=DIR       an MPI in DIR/include and DIR/lib instead of what mpicc names
#   MPI=0             one rank
#   CUDA_HOME=DIR     a CUDA toolkit (or its headers) elsewhere than where nvcc is, or /usr/local/cuda
#   USE_CUDNN=0       attention by our own kernels alone
#   CUDNN_FRONTEND_DIR=DIR   cudnn_frontend.h in DIR instead of where it was found
#   DNNL_DIR=DIR      oneDNN in DIR/include and DIR/lib, for the benchmarks alone
#   GPU_ARCH=sm_90    for which GPU train_gpt_nvfp4 is built, instead of the one found
COMMA := ,
MAKEFLAGS += --no-builtin-rules --no-print-directory
.SUFFIXES:
.DEFAULT_GOAL := all

BUILD    ?= build
-include build/deps/settings.mk # from scripts/setup.sh, where it had to bring a compiler or cJSON
CC       ?= cc
ifeq ($(origin CC),default)
CC       := $(if $(shell command -v gcc),gcc,cc)
endif
ARCH     := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine 2>/dev/null)))
OPTIMIZE ?= -O3
WARNINGS := -Wall -Wextra
CFLAGS   := -std=c11 $(OPTIMIZE) -g -ffp-contract=off -fno-math-errno -fno-trapping-math $(WARNINGS) $(EXTRA_CFLAGS)
CPPFLAGS := -D_GNU_SOURCE -Illmc
LDLIBS   := -lm -lpthread

# OpenMP: there when the compiler's runtime is (gcc: libgomp.so; clang: libomp.so two folders above its own).
ifneq ($(findstring clang,$(shell $(CC) --version 2>/dev/null | head -n 1)),)
OPENMP_LIBRARY := libomp.so
OPENMP ?= $(if $(wildcard $(shell $(CC) -print-resource-dir)/../../libomp.so),1,0)
else
OPENMP_LIBRARY := libgomp.so
OPENMP ?= $(if $(findstring /,$(shell $(CC) -print-file-name=$(OPENMP_LIBRARY) 2>/dev/null)),1,0)
endif
ifeq ($(OPENMP),1)
CFLAGS += -fopenmp
else
CFLAGS += -Wno-unknown-pragmas
SKIPPED += OpenMP ($(OPENMP_LIBRARY) of $(CC) not found or OPENMP=0: one thread);
endif

# cJSON: the system's, or CJSON_DIR.
ifdef CJSON_DIR
CPPFLAGS += -I$(CJSON_DIR)/include
LDFLAGS  += -L$(CJSON_DIR)/lib -Wl,-rpath,$(abspath $(CJSON_DIR)/lib)
endif
LDLIBS   += -lcjson

# MPI: there when mpicc names a folder with mpi.h, or in MPI_DIR.
ifneq ($(MPI),0)
MPI_FLAGS := $(if $(MPI_DIR),-I$(MPI_DIR)/include -L$(MPI_DIR)/lib -Wl$(COMMA)-rpath$(COMMA)$(abspath $(MPI_DIR)/lib) \
               -lmpi,$(filter -I% -L% -l% -Wl%,$(shell mpicc -show 2>/dev/null)))
MPI_H     := $(wildcard $(patsubst -I%,%/mpi.h,$(filter -I%,$(MPI_FLAGS))) $(if $(MPI_FLAGS),/usr/include/mpi.h))
endif
ifneq ($(MPI_H),)
CPPFLAGS += -DLLMC_MPI $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_FLAGS)))
LDFLAGS  += $(filter -L% -Wl%,$(MPI_FLAGS))
LDLIBS   += $(filter -l%,$(MPI_FLAGS))
else
SKIPPED  += MPI (no mpicc or no mpi.h, or MPI=0: one rank);
endif

# The CPU backend: the same sources once per instruction set.
ISAS := portable
FLAGS_portable :=
ifneq ($(filter x86_64 amd64,$(ARCH)),)
ISAS += avx2 avx512 amx
FLAGS_avx2   := -mavx2 -mfma
FLAGS_avx512 := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma
FLAGS_amx    := $(FLAGS_avx512) -mamx-tile -mamx-bf16
endif
AMX_SOURCES    := llmc/cpu/gemm_amx.c
SHARED_SOURCES := llmc/cpu/backend.c llmc/cpu/gemm.c
ISA_SOURCES    := $(filter-out $(AMX_SOURCES) $(SHARED_SOURCES),$(wildcard llmc/cpu/*.c))
CPU_OBJECTS    := $(patsubst llmc/cpu/%.c,$(BUILD)/cpu/%.o,$(SHARED_SOURCES)) \
                  $(foreach isa,$(filter-out amx,$(ISAS)),$(patsubst llmc/cpu/%.c,$(BUILD)/cpu/%.$(isa).o,$(ISA_SOURCES))) \
                  $(if $(filter amx,$(ISAS)),$(patsubst llmc/cpu/%.c,$(BUILD)/cpu/%.amx.o,$(AMX_SOURCES)))
LIB_OBJECTS    := $(patsubst llmc/%.c,$(BUILD)/%.o,$(filter-out $(if $(MPI_H),,llmc/comm_mpi.c),$(wildcard llmc/*.c)))
TESTS          := $(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/test_*.c))
RANKS_TESTS    := $(if $(MPI_H),$(patsubst test/%.c,$(BUILD)/test/%,$(wildcard test/ranks_*.c)))

# CUDA: nvcc builds for a GPU; the toolkit's headers are enough to build the same sources for a CPU (dev/cuda_on_cpu).
CUDA_HOME ?= $(or $(patsubst %/bin/nvcc,%,$(realpath $(shell command -v nvcc))),/usr/local/cuda)
NVCC      ?= $(CUDA_HOME)/bin/nvcc
CUDA_H    := $(wildcard $(CUDA_HOME)/include/cublasLt.h)
NCCL_H    := $(firstword $(wildcard $(CUDA_HOME)/include/nccl.h /usr/local/include/nccl.h /usr/include/nccl.h))
GPU_ARCH  ?= $(addprefix sm_,$(subst .,,$(firstword $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null))))
GENCODE   = -arch=$(patsubst sm_120,sm_120f,$(patsubst sm_103,sm_103a,$(patsubst sm_100,sm_100a,$(GPU_ARCH))))
FAT       := $(foreach a,80 90 100a 103a 120f,-gencode arch=compute_$(a),code=sm_$(a)) -gencode arch=compute_120,code=compute_120
NVFLAGS   := -std=c++17 -O3 -fmad=false -lineinfo -Xcompiler "-Wall -Wextra -Wno-unused-parameter" -Xptxas -v
# cuDNN for attention: there when its headers are and cudnn-frontend's, in a system folder or where pip puts them.
ifneq ($(USE_CUDNN),0)
CUDNN_PLACES := $(CUDA_HOME)/include /usr/local/include /usr/include
CUDNN_H      := $(firstword $(wildcard $(CUDNN_PLACES:=/cudnn.h) /usr/include/$(ARCH)-linux-gnu/cudnn.h))
PIP_PLACES   := $(foreach d,$(VIRTUAL_ENV) $(HOME)/.local /usr/local /usr,$(d)/lib/python3*/site-packages $(d)/lib/python3*/dist-packages)
CUDNN_FRONTEND_DIR ?= $(patsubst %/cudnn_frontend.h,%,$(firstword $(wildcard $(CUDNN_PLACES:=/cudnn_frontend.h) $(PIP_PLACES:=/include/cudnn_frontend.h))))
CUDNN        := $(if $(CUDNN_H),$(wildcard $(CUDNN_FRONTEND_DIR:=/cudnn_frontend.h)))
endif
ifneq ($(CUDNN),)
NVFLAGS   += -DLLMC_CUDNN $(patsubst %,-isystem %,$(filter-out /usr/include /usr/local/include,$(CUDNN_FRONTEND_DIR)))
endif
CUDA_SOURCES := $(filter-out llmc/cuda/attention_cudnn.cu,$(wildcard llmc/cuda/*.cu))
ifneq ($(and $(MPI_H),$(NCCL_H)),)
NCCL_FLAGS := -DLLMC_NCCL $(addprefix -isystem ,$(filter-out $(CUDA_HOME)/include /usr/include,$(patsubst %/,%,$(dir $(NCCL_H)))))
else ifneq ($(CUDA_H),)
SKIPPED   += NCCL (no nccl.h, or no MPI: the CUDA programs run on one GPU);
endif
ifeq ($(origin CXX),default) # of the same maker as CC
CXX       := $(if $(findstring clang,$(CC)),$(subst clang,clang++,$(CC)),$(subst gcc,g++,$(if $(findstring gcc,$(CC)),$(CC),gcc)))
endif
# Without the headers, a C++ compiler or Python the tests of CUDA are skipped.
CUDA_TEST = $(if $(and $(CUDA_H),$(shell command -v $(CXX)),$(shell command -v python3)),train_gpt_nvfp4_cpu $(addprefix $(CPU_CUDA)/,cuda_ops bytes_cuda quantize_block $(if $(NCCL_FLAGS),ranks_comm)))
# cuda_on_cpu: objects in $(CPU_CUDA); optimised like the CPU backend, so that the program can be used.
CPU_CUDA  := $(BUILD)/cuda_on_cpu
CXXFLAGS  := -std=c++17 $(OPTIMIZE) -g -ffp-contract=off -fno-math-errno -fno-trapping-math $(WARNINGS) -Wno-unknown-pragmas -Wno-pass-failed $(filter -fopenmp,$(CFLAGS)) $(EXTRA_CFLAGS)
CPU_CUDA_FLAGS = $(CXXFLAGS) -DCUDA_ON_CPU -Illmc -Idev/cuda_on_cpu -isystem $(CUDA_HOME)/include $(NCCL_FLAGS)
CPU_CUDA_LIBRARY := $(patsubst dev/cuda_on_cpu/%.cpp,$(CPU_CUDA)/%.o,$(filter-out $(if $(NCCL_FLAGS),,%/nccl.cpp %/nccl_run.cpp),$(wildcard dev/cuda_on_cpu/*.cpp)))
CPU_CUDA_OBJECTS := $(patsubst llmc/cuda/%.cu,$(CPU_CUDA)/filtered/%.o,$(CUDA_SOURCES)) $(if $(NCCL_FLAGS),$(CPU_CUDA)/filtered/comm_nccl.o)

.PHONY: all test test-all test-asan bench bytes check clean help tests test-programs skipped fat prebuilt
all: train_gpt skipped ## build train_gpt

skipped:
	@$(if $(SKIPPED),echo "skipped: $(SKIPPED)",:)

train_gpt: $(BUILD)/train_gpt.o $(LIB_OBJECTS) $(CPU_OBJECTS)
	@$(CC) $(CFLAGS) $(LDFLAGS) $^ $(LDLIBS) -o $@

$(BUILD)/train_gpt.o: train_gpt.c $(BUILD)/flags
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/%.o: llmc/%.c $(BUILD)/flags
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) $(CFLAGS) -MMD -MP -c $< -o $@

define ISA_RULE
$(BUILD)/cpu/%.$(1).o: llmc/cpu/%.c $(BUILD)/flags
	@mkdir -p $$(@D)
	@$$(CC) $$(CPPFLAGS) $$(CFLAGS) $(FLAGS_$(1)) -DISA=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach isa,$(ISAS),$(eval $(call ISA_RULE,$(isa))))

$(BUILD)/test/%: test/%.c $(LIB_OBJECTS) $(CPU_OBJECTS)
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) -Itest $(CFLAGS) $(LDFLAGS) -MMD -MP $< $(LIB_OBJECTS) $(CPU_OBJECTS) $(LDLIBS) -o $@

$(BUILD)/bench/%: dev/bench/%.c $(LIB_OBJECTS) $(CPU_OBJECTS)
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -MMD -MP $< $(PEERS) $(LIB_OBJECTS) $(CPU_OBJECTS) $(LDLIBS) -o $@

# oneDNN, what bench_gemm compares with: there when its header is, or in DNNL_DIR.
DNNL_H := $(firstword $(wildcard $(addsuffix /include/oneapi/dnnl/dnnl.h,$(DNNL_DIR) /usr/local /usr)))
$(BUILD)/bench/bench_gemm: PEERS = dev/bench/peer_dnnl.c -ldl $(if $(DNNL_H),-DLLMC_DNNL -ldnnl) \
    $(if $(DNNL_DIR),-isystem $(DNNL_DIR)/include -L$(DNNL_DIR)/lib -Wl$(COMMA)-rpath$(COMMA)$(abspath $(DNNL_DIR)/lib))
$(BUILD)/bench/bench_gemm: dev/bench/peer_dnnl.c dev/bench/peers.h

$(BUILD)/ablation/%: dev/ablation/%.c $(LIB_OBJECTS) $(CPU_OBJECTS)
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) -MMD -MP $< $(LIB_OBJECTS) $(CPU_OBJECTS) $(LDLIBS) -o $@

# ---- for GPUs ----

$(BUILD)/nvcc/%.o: llmc/cuda/%.cu $(BUILD)/nvcc/flags
	@mkdir -p $(@D)
	@$(NVCC) $(NVFLAGS) $(GENCODE) -Illmc -MMD -MP -c $< -o $@ 2>$(@:.o=.log) || { cat $(@:.o=.log); exit 1; }
	@grep -E 'warning' $(@:.o=.log) || :

$(BUILD)/nvcc/comm_nccl.o: llmc/comm_nccl.cu $(BUILD)/nvcc/flags
	@mkdir -p $(@D)
	@$(NVCC) $(filter-out -Xptxas -v,$(NVFLAGS)) $(GENCODE) -Illmc $(NCCL_FLAGS) -MMD -MP -c $< -o $@

$(BUILD)/nvcc/train_gpt_nvfp4.o: train_gpt_nvfp4.cu $(BUILD)/nvcc/flags
	@mkdir -p $(@D)
	@$(NVCC) $(filter-out -Xptxas -v,$(NVFLAGS)) $(GENCODE) -Illmc $(NCCL_FLAGS) -MMD -MP -c $< -o $@

# Tests and benchmarks of the device: build/nvcc/cuda_ops, build/nvcc/bench_cuda
NVCC_OBJECTS := $(patsubst llmc/cuda/%.cu,$(BUILD)/nvcc/%.o,$(CUDA_SOURCES) $(if $(CUDNN),llmc/cuda/attention_cudnn.cu)) $(if $(NCCL_FLAGS),$(BUILD)/nvcc/comm_nccl.o)
NVLINK = $(NVCC) $(GENCODE) $(filter %.o,$^) -o $@ -lcublasLt $(if $(CUDNN),-lcudnn -lnvrtc) $(if $(NCCL_FLAGS),-lnccl) $(filter -L%,$(LDFLAGS)) $(patsubst -Wl$(COMMA)%,-Xlinker %,$(filter -Wl%,$(LDFLAGS))) \
         $(LDLIBS) $(if $(filter 1,$(OPENMP)),-lgomp)
$(BUILD)/nvcc/cuda_ops: $(BUILD)/nvcc/cuda_ops.o $(NVCC_OBJECTS) $(LIB_OBJECTS) $(CPU_OBJECTS)
	@$(NVLINK)
$(BUILD)/nvcc/bench_cuda: $(BUILD)/nvcc/bench_cuda.o $(NVCC_OBJECTS) $(LIB_OBJECTS)
	@$(NVLINK)
$(BUILD)/nvcc/bench_cuda.o: dev/bench/bench_cuda.cu $(BUILD)/nvcc/flags
	@mkdir -p $(@D)
	@$(NVCC) $(filter-out -Xptxas -v,$(NVFLAGS)) $(GENCODE) -Illmc -MMD -MP -c $< -o $@
$(BUILD)/nvcc/cuda_ops.o: test/cuda_ops.c $(BUILD)/flags
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) -Itest $(CFLAGS) -MMD -MP -c $< -o $@

$(BUILD)/nvcc/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(NVCC) $(NVFLAGS) $(GENCODE) $(NCCL_FLAGS)' | cmp -s - $@ || echo '$(NVCC) $(NVFLAGS) $(GENCODE) $(NCCL_FLAGS)' > $@

train_gpt_nvfp4: $(if $(and $(wildcard $(NVCC)),$(GPU_ARCH)),$(BUILD)/nvcc/train_gpt_nvfp4.o $(NVCC_OBJECTS) $(LIB_OBJECTS),FORCE) ## build for the GPU found, or GPU_ARCH=sm_90
	@[ -x "$(NVCC)" ] || { echo "train_gpt_nvfp4: no nvcc in $(CUDA_HOME)/bin: install the CUDA toolkit, or give CUDA_HOME="; exit 1; }
	@[ -n "$(GPU_ARCH)" ] || { echo "train_gpt_nvfp4: no GPU found (nvidia-smi): give GPU_ARCH=sm_90, or make fat"; exit 1; }
	@$(NVLINK)
	@$(if $(CUDNN),:,echo "train_gpt_nvfp4: attention by our own kernels (no cudnn.h$(COMMA) no cudnn_frontend.h$(COMMA) or USE_CUDNN=0)")

fat: ## train_gpt_nvfp4 for sm_80, 90, 100a, 103a, 120f and newer
	@$(MAKE) train_gpt_nvfp4 BUILD=$(BUILD)/fat GPU_ARCH=all GENCODE='$(FAT)'

prebuilt: train_gpt train_gpt_nvfp4 $(BUILD)/nvcc/cuda_ops $(BUILD)/nvcc/bench_cuda ## what dev/gpu_check.sh runs, into build/prebuilt
	@mkdir -p build/prebuilt
	@cp $^ build/prebuilt

# ---- the CUDA program on a CPU ----

$(CPU_CUDA)/%.o: dev/cuda_on_cpu/%.cpp $(CPU_CUDA)/flags
	@mkdir -p $(@D)
	@$(CXX) $(CPU_CUDA_FLAGS) $(patsubst -I%,-isystem %,$(filter -I%,$(MPI_FLAGS))) -MMD -MP -c $< -o $@

# A .cu file goes through the filter for launches, then to the C++ compiler.
define FILTER_RULE
$(CPU_CUDA)/filtered/%.cpp: $(1)%.cu dev/cuda_on_cpu/launch_filter.py
	@mkdir -p $$(@D)
	@python3 dev/cuda_on_cpu/launch_filter.py $$< $$@ $$(@:.cpp=.filter.d)
endef
$(foreach folder,llmc/cuda/ llmc/ dev/bench/ test/ ./,$(eval $(call FILTER_RULE,$(folder))))
$(CPU_CUDA)/filtered/%.o: $(CPU_CUDA)/filtered/%.cpp $(CPU_CUDA)/flags
	@$(CXX) $(CPU_CUDA_FLAGS) -iquote llmc/cuda -Itest -include cuda_on_cpu.h -MMD -MP -c $< -o $@
.PRECIOUS: $(CPU_CUDA)/filtered/%.cpp

# The same two, on a CPU.
$(CPU_CUDA)/cuda_ops: $(CPU_CUDA)/cuda_ops.o $(CPU_CUDA_OBJECTS) $(CPU_CUDA_LIBRARY) $(LIB_OBJECTS) $(CPU_OBJECTS)
	@$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ $(LDLIBS) -o $@
$(CPU_CUDA)/cuda_ops.o: test/cuda_ops.c $(BUILD)/flags
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) -Itest -DCUDA_ON_CPU $(CFLAGS) -MMD -MP -c $< -o $@
# The collectives of comm.h with NCCL, for mpirun; also build/nvcc/ranks_comm, for GPUs.
$(CPU_CUDA)/ranks_comm: $(CPU_CUDA)/ranks_comm.o $(CPU_CUDA)/filtered/staged_comm.o $(CPU_CUDA_OBJECTS) $(CPU_CUDA_LIBRARY) $(LIB_OBJECTS)
	@$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ $(LDLIBS) -o $@
$(BUILD)/nvcc/ranks_comm: $(CPU_CUDA)/ranks_comm.o $(BUILD)/nvcc/staged_comm.o $(NVCC_OBJECTS) $(LIB_OBJECTS)
	@$(NVLINK)
$(CPU_CUDA)/ranks_comm.o: test/ranks_comm.c $(BUILD)/flags
	@mkdir -p $(@D)
	@$(CC) $(CPPFLAGS) -Itest -DCOMM_STAGED $(CFLAGS) -MMD -MP -c $< -o $@
$(BUILD)/nvcc/staged_comm.o: test/staged_comm.cu $(BUILD)/nvcc/flags
	@mkdir -p $(@D)
	@$(NVCC) $(filter-out -Xptxas -v,$(NVFLAGS)) $(GENCODE) -Illmc -MMD -MP -c $< -o $@

$(CPU_CUDA)/quantize_block: $(CPU_CUDA)/filtered/quantize_block.o $(CPU_CUDA_OBJECTS) $(CPU_CUDA_LIBRARY) $(LIB_OBJECTS)
	@$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ $(LDLIBS) -o $@
$(CPU_CUDA)/bytes_cuda: $(CPU_CUDA)/filtered/bytes_cuda.o $(CPU_CUDA_OBJECTS) $(CPU_CUDA_LIBRARY) $(LIB_OBJECTS)
	@$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ $(LDLIBS) -o $@
bytes: $(if $(CUDA_H),$(CPU_CUDA)/bytes_cuda,FORCE) ## count the bytes that the quantizing kernels move; needs the CUDA headers
	@[ -n "$(CUDA_H)" ] || { echo "$@: no CUDA headers in $(CUDA_HOME)/include: see dev/cuda_on_cpu/README.md, or give CUDA_HOME="; exit 1; }
	@CUDA_ON_CPU_STATS=1 $(CPU_CUDA)/bytes_cuda 2>/dev/null

$(CPU_CUDA)/bench_cuda: $(CPU_CUDA)/filtered/bench_cuda.o $(CPU_CUDA_OBJECTS) $(CPU_CUDA_LIBRARY) $(LIB_OBJECTS)
	@$(CXX) $(CXXFLAGS) $(LDFLAGS) $^ $(LDLIBS) -o $@
$(CPU_CUDA)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CXX) $(CPU_CUDA_FLAGS)' | cmp -s - $@ || echo '$(CXX) $(CPU_CUDA_FLAGS)' > $@

train_gpt_nvfp4_cpu: $(if $(CUDA_H),$(CPU_CUDA)/filtered/train_gpt_nvfp4.o $(CPU_CUDA_OBJECTS) $(CPU_CUDA_LIBRARY) $(LIB_OBJECTS),FORCE) ## build the CUDA program for a CPU; needs the CUDA headers
	@[ -n "$(CUDA_H)" ] || { echo "$@: no CUDA headers in $(CUDA_HOME)/include: see dev/cuda_on_cpu/README.md, or give CUDA_HOME="; exit 1; }
	@$(CXX) $(CXXFLAGS) $(LDFLAGS) -Wl,-Map=$(CPU_CUDA)/link.map $^ $(LDLIBS) -o $@

# A change of compiler or flags rebuilds everything.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) $(foreach isa,$(ISAS),$(isa) $(FLAGS_$(isa)))' | cmp -s - $@ || echo '$(CC) $(CPPFLAGS) $(CFLAGS) $(LDFLAGS) $(foreach isa,$(ISAS),$(isa) $(FLAGS_$(isa)))' > $@
FORCE:

tests: $(TESTS) $(RANKS_TESTS)
test-programs: train_gpt tests $(CUDA_TEST) # all of them: tests run side by side, and two that build the same would meet

test: test-programs ## the everyday suite (CPU only, under 10 minutes)
	@BUILD=$(BUILD) test/run.sh $(TESTS) $(sort $(wildcard test/test_*.sh))

test-all: test-programs ## the long suite (under 60 minutes)
	@BUILD=$(BUILD) LLMC_TEST_ALL=1 test/run.sh $(TESTS) $(sort $(wildcard test/test_*.sh))

test-asan: ## the unit tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@$(MAKE) -j $$(getconf _NPROCESSORS_ONLN) BUILD=build/asan OPTIMIZE="-O1" EXTRA_CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer" tests
	@BUILD=build/asan test/run.sh $(patsubst $(BUILD)/%,build/asan/%,$(TESTS))

bench: $(patsubst dev/bench/%.c,$(BUILD)/bench/%,$(wildcard dev/bench/bench_*.c)) ## build the benchmarks into build/bench

check: ## warnings as errors, floors, cppcheck, clang-format 14
	@scripts/check.sh

clean: ## remove what was built (not build/deps, what scripts/setup.sh brought)
	@rm -rf train_gpt train_gpt_nvfp4 train_gpt_nvfp4_cpu $(filter-out build/deps,$(wildcard $(BUILD)/* build/*))

help: ## this list
	@awk -F ':.*## ' '/^[a-z_0-9-]+:.*## /{printf "  make %-20s %s\n", $$1, $$2}' Makefile

-include $(shell find $(BUILD) -path build/deps -prune -o -name '*.d' -print 2>/dev/null)
