#pragma once

#include <cstddef>

#include "tests/cuda_emulator/library_types.h"
#include "tests/cuda_emulator/vector_types.h"

// The part of CUDA 13.0's runtime that this project calls. Names, values and meaning are those of
// NVIDIA's "CUDA Runtime API" reference; where that leaves a program undefined, the emulator ends
// it with a message.

#define CUDART_VERSION 13000

// name, value, text of cudaGetErrorString
#define CUDA_EMULATOR_ERRORS(row)                                                                                      \
  row(cudaSuccess, 0, "no error") row(cudaErrorInvalidValue, 1, "invalid argument") row(                               \
      cudaErrorMemoryAllocation, 2,                                                                                    \
      "out of memory") row(cudaErrorInvalidConfiguration, 9,                                                           \
                           "invalid configuration argument") row(cudaErrorInvalidDevicePointer, 17,                    \
                                                                 "invalid device pointer")                             \
      row(cudaErrorInvalidMemcpyDirection, 21, "invalid copy direction for memcpy") row(                               \
          cudaErrorInsufficientDriver, 35,                                                                             \
          "CUDA driver version is insufficient for CUDA runtime version") row(cudaErrorInvalidDeviceFunction, 98,      \
                                                                              "invalid device function")               \
          row(cudaErrorNoDevice, 100, "no CUDA-capable device is detected") row(                                       \
              cudaErrorInvalidDevice, 101, "invalid device ordinal") row(cudaErrorInvalidResourceHandle, 400,          \
                                                                         "invalid resource handle")                    \
              row(cudaErrorIllegalState, 401, "the operation cannot be performed in the present state") row(           \
                  cudaErrorNotReady, 600, "device not ready") row(cudaErrorIllegalAddress, 700,                        \
                                                                  "an illegal memory access was encountered")          \
                  row(cudaErrorLaunchOutOfResources, 701, "too many resources requested for launch") row(              \
                      cudaErrorHostMemoryAlreadyRegistered, 712,                                                       \
                      "part or all of the requested memory range is already mapped")                                   \
                      row(cudaErrorHostMemoryNotRegistered, 713,                                                       \
                          "pointer does not correspond to a registered memory region") row(cudaErrorMisalignedAddress, \
                                                                                           716, "misaligned address")  \
                          row(cudaErrorLaunchFailure, 719, "unspecified launch failure") row(                          \
                              cudaErrorNotPermitted, 800, "operation not permitted")                                   \
                              row(cudaErrorNotSupported, 801, "operation not supported") row(                          \
                                  cudaErrorStreamCaptureUnsupported, 900,                                              \
                                  "operation not permitted when stream is capturing")                                  \
                                  row(cudaErrorStreamCaptureInvalidated, 901,                                          \
                                      "operation failed due to a previous error during capture")                       \
                                      row(cudaErrorStreamCaptureMerge, 902,                                            \
                                          "operation would result in a merge of separate capture sequences")           \
                                          row(cudaErrorStreamCaptureUnmatched, 903,                                    \
                                              "capture was not ended in the same stream as it began")                  \
                                              row(cudaErrorStreamCaptureUnjoined, 904,                                 \
                                                  "capturing stream has unjoined work")                                \
                                                  row(cudaErrorStreamCaptureIsolation, 905,                            \
                                                      "dependency created on uncaptured work in another stream")       \
                                                      row(cudaErrorStreamCaptureImplicit, 906,                         \
                                                          "operation would make the legacy stream depend on a "        \
                                                          "capturing blocking stream")                                 \
                                                          row(cudaErrorCapturedEvent, 907,                             \
                                                              "operation not permitted on an event last recorded in "  \
                                                              "a capturing stream")                                    \
                                                              row(cudaErrorStreamCaptureWrongThread, 908,              \
                                                                  "attempt to terminate a thread-local capture "       \
                                                                  "sequence from another thread")                      \
                                                                  row(cudaErrorGraphExecUpdateFailure, 910,            \
                                                                      "the graph update was not performed because it " \
                                                                      "included changes which violated constraints "   \
                                                                      "specific to instantiated graph update")         \
                                                                      row(cudaErrorUnknown, 999, "unknown error")

typedef enum cudaError {
#define CUDA_EMULATOR_ROW(name, value, text) name = value,
  CUDA_EMULATOR_ERRORS(CUDA_EMULATOR_ROW)
#undef CUDA_EMULATOR_ROW
} cudaError_t;

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
typedef struct CUgraph_st* cudaGraph_t;
typedef struct CUgraphExec_st* cudaGraphExec_t;
typedef struct CUgraphNode_st* cudaGraphNode_t;
typedef void (*cudaHostFn_t)(void* data);

#define cudaStreamLegacy (reinterpret_cast<cudaStream_t>(0x1))
#define cudaStreamPerThread (reinterpret_cast<cudaStream_t>(0x2))
#define cudaStreamDefault 0x00u
#define cudaStreamNonBlocking 0x01u
#define cudaEventDefault 0x00u
#define cudaEventBlockingSync 0x01u
#define cudaEventDisableTiming 0x02u
#define cudaEventInterprocess 0x04u
#define cudaEventRecordDefault 0x00u
#define cudaEventRecordExternal 0x01u
#define cudaEventWaitDefault 0x00u
#define cudaEventWaitExternal 0x01u
#define cudaHostAllocDefault 0x00u
#define cudaHostAllocPortable 0x01u
#define cudaHostAllocMapped 0x02u
#define cudaHostAllocWriteCombined 0x04u

enum cudaMemcpyKind {
  cudaMemcpyHostToHost = 0,
  cudaMemcpyHostToDevice = 1,
  cudaMemcpyDeviceToHost = 2,
  cudaMemcpyDeviceToDevice = 3,
  cudaMemcpyDefault = 4,
};
enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3,
};
enum cudaStreamCaptureStatus {
  cudaStreamCaptureStatusNone = 0,
  cudaStreamCaptureStatusActive = 1,
  cudaStreamCaptureStatusInvalidated = 2,
};
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal = 0,
  cudaStreamCaptureModeThreadLocal = 1,
  cudaStreamCaptureModeRelaxed = 2,
};
enum cudaFuncAttribute {
  cudaFuncAttributeMaxDynamicSharedMemorySize = 8,
  cudaFuncAttributePreferredSharedMemoryCarveout = 9,
};
enum cudaGraphInstantiateFlags {
  cudaGraphInstantiateFlagAutoFreeOnLaunch = 1,
  cudaGraphInstantiateFlagUpload = 2,
  cudaGraphInstantiateFlagUseNodePriority = 8,
};
enum cudaDeviceAttr {
  cudaDevAttrMaxThreadsPerBlock = 1,
  cudaDevAttrMaxBlockDimX = 2,
  cudaDevAttrMaxBlockDimY = 3,
  cudaDevAttrMaxBlockDimZ = 4,
  cudaDevAttrMaxGridDimX = 5,
  cudaDevAttrMaxGridDimY = 6,
  cudaDevAttrMaxGridDimZ = 7,
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrWarpSize = 10,
  cudaDevAttrMaxRegistersPerBlock = 12,
  cudaDevAttrClockRate = 13,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrMemoryClockRate = 36,
  cudaDevAttrGlobalMemoryBusWidth = 37,
  cudaDevAttrL2CacheSize = 38,
  cudaDevAttrMaxThreadsPerMultiProcessor = 39,
  cudaDevAttrUnifiedAddressing = 41,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
  cudaDevAttrStreamPrioritiesSupported = 78,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
  cudaDevAttrMaxRegistersPerMultiprocessor = 82,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97,
  cudaDevAttrMaxBlocksPerMultiprocessor = 106,
  cudaDevAttrReservedSharedMemoryPerBlock = 111,
};

// As in CUDA 13, without clocks; fields that this project does not read are left out.
struct cudaDeviceProp {
  char name[256];
  std::size_t totalGlobalMem;
  std::size_t sharedMemPerBlock;
  int regsPerBlock;
  int warpSize;
  int maxThreadsPerBlock;
  int maxThreadsDim[3];
  int maxGridSize[3];
  std::size_t totalConstMem;
  int major;
  int minor;
  int multiProcessorCount;
  int concurrentKernels;
  int ECCEnabled;
  int pciBusID;
  int pciDeviceID;
  int pciDomainID;
  int asyncEngineCount;
  int unifiedAddressing;
  int memoryBusWidth;
  int l2CacheSize;
  int maxThreadsPerMultiProcessor;
  int streamPrioritiesSupported;
  std::size_t sharedMemPerMultiprocessor;
  int regsPerMultiprocessor;
  std::size_t sharedMemPerBlockOptin;
  int maxBlocksPerMultiProcessor;
  std::size_t reservedSharedMemPerBlock;
};

struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void* devicePointer;
  void* hostPointer;
};

typedef enum cudaLaunchAttributeID {
  cudaLaunchAttributeIgnore = 0,
  cudaLaunchAttributePriority = 8
} cudaLaunchAttributeID;
typedef union cudaLaunchAttributeValue {
  char pad[64];
  int priority;
} cudaLaunchAttributeValue;
typedef struct cudaLaunchAttribute_st {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
} cudaLaunchAttribute;
typedef struct cudaLaunchConfig_st {
  dim3 gridDim;
  dim3 blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned int numAttrs;
} cudaLaunchConfig_t;

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();

cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDeviceGetPCIBusId(char* bus_id, int length, int device);
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest);
cudaError_t cudaDeviceSynchronize();

cudaError_t cudaMalloc(void** memory, std::size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMallocHost(void** memory, std::size_t bytes);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* memory);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream = nullptr);
cudaError_t cudaMemset(void* memory, int value, std::size_t bytes);
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t bytes, cudaStream_t stream = nullptr);

cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data);

cudaError_t cudaEventCreate(cudaEvent_t* event);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream = nullptr);
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream = nullptr, unsigned flags = 0);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end);

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable);

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
