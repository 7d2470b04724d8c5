/* SPDX-License-Identifier: Apache-2.0
 *
 * libattend_kernels.so: attend's kernels as a plain C interface, for programs whose tensors are
 * already on a GPU or in host memory (ctypes, DLPack, other languages). Terms and the order of
 * score terms are those of kernels/contract/problem.h.
 *
 * Every function returns ATTEND_OK or a code with gRPC's number; attend_last_error() then names,
 * for the calling thread, the field, the value and the bound. Thread-safe. No state is kept between
 * calls.
 *
 * On a GPU (`device` is CUDA's ordinal) all pointers are device memory, and calls enqueue work.
 * Only the memory functions at the end allocate on the device or wait for it (CUDA itself may wait
 * to copy the list of a batch of more than about 64 attentions). A library built without CUDA
 * refuses GPUs with ATTEND_UNIMPLEMENTED.
 *
 * On the CPU (`device` is ATTEND_CPU) all pointers are host memory, there are no streams (they must
 * be NULL) and no workspace, and calls are synchronous. They use all cores that the process may
 * use. Lengths and offsets are validated before use; page tables are trusted.
 *
 * A CUDA graph can capture single attentions only; with lengths or offsets, only if a decoding
 * kernel computes them. All others copy a list from host memory, which no longer exists when the
 * graph is launched.
 *
 * Workspace: device memory that a call uses while it runs, of attend_workspace_bytes or
 * attend_batch_workspace_bytes bytes, 256-byte aligned. Its first 16384 bytes must be zero before
 * the first use; every call leaves them zero. One workspace serves one stream at a time. */

#ifndef ATTEND_KERNELS_ATTEND_C_H_
#define ATTEND_KERNELS_ATTEND_C_H_

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#if defined(__GNUC__)
#define ATTEND_API __attribute__((visibility("default")))
#else
#define ATTEND_API
#endif

enum {
  ATTEND_OK = 0,
  ATTEND_INVALID_ARGUMENT = 3,
  ATTEND_RESOURCE_EXHAUSTED = 8,
  ATTEND_UNIMPLEMENTED = 12,
  ATTEND_INTERNAL = 13
};

enum {
  ATTEND_FLOAT16 = 1,
  ATTEND_BFLOAT16 = 2,
  ATTEND_FLOAT32 = 3,
  ATTEND_BIT = 4,     /* for a bias only: a mask, eight keys to a byte from the lowest bit on; 1
                       * keeps the key, 0 removes it completely. Strides are multiples of 8. */
  ATTEND_FLOAT64 = 64 /* for cpu_reference only, by name */
};
enum { ATTEND_BOTTOM_RIGHT = 0, ATTEND_TOP_LEFT = 1 };
enum { ATTEND_CPU = -1 }; /* as `device` */
enum { ATTEND_HOST_TO_DEVICE = 1, ATTEND_DEVICE_TO_HOST = 2, ATTEND_DEVICE_TO_DEVICE = 3 };

/* A [B, H, L, D] tensor in the device's memory. Strides count elements; D is contiguous. Packed
 * tensors have stride_b = 0 and rows counted over all sequences. */
typedef struct attend_tensor {
  void* data;
  int64_t stride_b;
  int64_t stride_h;
  int64_t stride_l;
} attend_tensor;

/* One attention. Zero it, set struct_bytes, then what applies. All pointers are the device's
 * memory. */
typedef struct attend_params {
  uint64_t struct_bytes; /* sizeof(attend_params); a library of another version refuses it */
  int32_t device;        /* of all memory and of the stream: an ordinal, or ATTEND_CPU */
  int32_t dtype;         /* of q, k and v: ATTEND_FLOAT16, ... */
  int32_t o_dtype;       /* of o: dtype (or 0, the same), or ATTEND_FLOAT32 */
  int64_t batch;
  int64_t heads_q;
  int64_t heads_kv;
  int64_t len_q; /* packed: of the longest sequence */
  int64_t len_k;
  int64_t dim;   /* of q and k, 1..256 */
  int64_t dim_v; /* of v and o, 1..256 */
  int32_t packed;
  int32_t alignment; /* of mask and ALiBi: ATTEND_BOTTOM_RIGHT, ATTEND_TOP_LEFT */
  int64_t total_q;   /* packed: rows over all sequences */
  int64_t total_k;
  int64_t window_left;  /* visible keys before the diagonal, -1 = all */
  int64_t window_right; /* visible keys after the diagonal, -1 = all; causal: 0 */
  /* K and V are a part of longer sequences, whose partial answers the caller merges by their LSE:
   * key_offset keys precede the part and keys_after keys follow it. Mask, ALiBi and dropout count
   * keys in the whole; a sink belongs to one part only. Set both for a backward pass of a part even
   * without mask, ALiBi and dropout: with both 0 it takes the keys for all that there are. */
  int64_t key_offset;
  int64_t keys_after;
  double scale;             /* usually 1/sqrt(dim); no default; fp32 unless float64 */
  double softcap;           /* 0 = off; rounded likewise */
  attend_tensor q, k, v, o; /* o and lse must not overlap themselves or any input */
  float* lse;               /* [B, Hq, Lq], packed [Hq, total_q]; NULL = not wanted */
  int64_t lse_stride_b;     /* packed: 0 */
  int64_t lse_stride_h;
  const void* bias; /* [B|1, Hq|1, Lq|1, Lk], broadcast where the stride is 0; NULL = none */
  int64_t bias_stride_b;
  int64_t bias_stride_h;
  int64_t bias_stride_q;
  int32_t bias_dtype;
  int32_t config;            /* compiled variant of the kernel, -1 = the best; attend_configs */
  const float* alibi_slopes; /* [Hq] or [B, Hq]; NULL = none */
  int64_t alibi_stride_b;    /* 0 = one set for all sequences */
  const float* sinks;        /* [Hq]; NULL = none */
  const int64_t* q_lengths;  /* [B], dense; NULL = all len_q */
  const int64_t* kv_lengths; /* [B], dense; NULL = all len_k */
  const int64_t* q_offsets;  /* [B + 1], packed */
  const int64_t* kv_offsets; /* [B + 1], packed */
  /* K and V in pages of page_rows keys (0: not paged): key j of sequence b is row j % page_rows
   * of page kv_pages[b * kv_pages_stride + j / page_rows] in both, and stride_b is the distance
   * between pages. In device memory, like lengths; entries beyond a sequence's length are not
   * read. */
  const int32_t* kv_pages;
  int64_t kv_pages_stride;
  int64_t page_rows;
  /* A weight is dropped with probability dropout_p, in [0, 1 - 2^-17), rounded to a multiple of
   * 2^-16; 0 = off. Which weights is a function of the seed, sequence, query head, row and key
   * alone: kernels/contract/dropout.h. If this attention is a slice of a larger one, the three
   * fields after the seed are added to its own sequence, head and row, as key_offset is to keys. */
  float dropout_p;
  uint64_t dropout_seed;
  int64_t dropout_sequence; /* in [0, 2^32), as the next */
  int64_t dropout_head;
  int64_t dropout_row; /* in [0, 2^32) */
  const char* kernel;  /* "cuda_flash_fp32", ...; NULL or "auto" = the best */
  void* workspace;     /* of attend_run, see above */
  int64_t workspace_bytes;
} attend_params;

/* The mask of a draft whose tokens are a tree (speculative decoding): bit j of row i is 1 where the
 * draft's token i sees token j. Zero it, set struct_bytes, then what applies. Host memory. */
typedef struct attend_tree {
  uint64_t struct_bytes;  /* sizeof(attend_tree) */
  const void* bits;       /* [B|1, tokens, tokens], as ATTEND_BIT; every row begins on a byte */
  int64_t tokens;         /* in [1, 1024] */
  int64_t stride_b;       /* bytes from one sequence's tree to the next's; 0 = one for all */
  const int64_t* lengths; /* [B] tokens of each sequence's draft; NULL = all */
} attend_tree;

/* The backward pass of one attention: from the gradients with respect to O and LSE to those with
 * respect to Q, K, V and, on request, bias and sinks. Zero it, set struct_bytes, then what
 * applies. */
typedef struct attend_backward_params {
  uint64_t struct_bytes; /* sizeof(attend_backward_params) */
  attend_params
      attention;      /* as attend_run took it, with the O and LSE that it gave, which are read;
                       * kernel and workspace are the backward pass's, config must be -1 */
  attend_tensor d_o;  /* as o, in its dtype */
  const float* d_lse; /* as lse, with its strides; NULL = 0 */
  attend_tensor d_q, d_k, d_v; /* written, as q, k and v, without overlaps; data is NULL = not
                                * wanted */
  float* d_bias;               /* written, [B|1, Hq|1, Lq|1, Lk]; NULL = not wanted; not of bits */
  int64_t d_bias_stride_b;     /* 0 where bias is broadcast: the sum over that dimension */
  int64_t d_bias_stride_h;
  int64_t d_bias_stride_q;
  float* d_sinks; /* written, [Hq]; NULL = not wanted */
} attend_backward_params;

/* Enqueues the attention on `stream` (a cudaStream_t, NULL = the default stream) and returns before
 * it has run; on the CPU, after. Lengths and offsets on a GPU are trusted. A kernel of your own
 * that is launched after it with programmatic stream serialization must call griddepcontrol.wait
 * (cudaGridDependencySynchronize) before it ends. */
ATTEND_API int32_t attend_run(const attend_params* params, void* stream);

/* The same for `count` attentions of any shapes on one device, in as few launches as their kernels
 * allow: one per kernel and compiled variant. They may run in any order and concurrently, so no
 * output may overlap another attention's tensors. The workspace is the batch's; those in `params`
 * are ignored. Nothing is enqueued if an argument is invalid; after a CUDA error (INTERNAL) some of
 * them may be. */
ATTEND_API int32_t attend_run_batch(const attend_params* params, int32_t count, void* workspace,
                                    int64_t workspace_bytes, void* stream);

/* Bytes of workspace that attend_run and attend_run_batch need: at least 16384; 0 on the CPU. Reads
 * no tensor memory, but the addresses and strides of q, k, v and o matter, as in attend_select. */
ATTEND_API int32_t attend_workspace_bytes(const attend_params* params, int64_t* bytes);
ATTEND_API int32_t attend_batch_workspace_bytes(const attend_params* params, int32_t count,
                                                int64_t* bytes);

/* The kernel that attend_run would use and why, as static strings; either may be NULL. */
ATTEND_API int32_t attend_select(const attend_params* params, const char** kernel,
                                 const char** why);

/* Enqueues the backward pass on `stream`, as attend_run does the forward's. Writes every row of the
 * requested gradients: 0 for rows beyond a sequence's length, rows that see no key, and keys that
 * no row sees. Bits are a function of the arguments alone; a server's may differ for the same
 * problem (where its workspace is small). On Hopper the workspace may be up to 4 GiB. LSE is
 * required. Keys in pages have no gradients (UNIMPLEMENTED). On the CPU it allocates up to 256 MiB
 * for partial sums, or 64 MiB and 4 (dim + dim_v) bytes per key if that is more. */
ATTEND_API int32_t attend_run_backward(const attend_backward_params* params, void* stream);

/* attend_workspace_bytes and attend_select for the backward pass. */
ATTEND_API int32_t attend_backward_workspace_bytes(const attend_backward_params* params,
                                                   int64_t* bytes);
ATTEND_API int32_t attend_select_backward(const attend_backward_params* params, const char** kernel,
                                          const char** why);

/* Writes a tree out as a bias [B, 1, len_q, len_k] of ATTEND_BIT, whose rows of len_k bits begin on
 * byte boundaries, to `bias`, host memory of that many bytes: the draft is each sequence's last
 * queries and keys. Of `params` it reads batch, len_q, len_k, packed and the lengths or offsets,
 * which must be in host memory here. */
ATTEND_API int32_t attend_write_tree(const attend_tree* tree, const attend_params* params,
                                     void* bias, int64_t bytes);

/* Number of compiled variants of the kernel for this problem, and the name of one ("" if out of
 * range). */
ATTEND_API int32_t attend_configs(const attend_params* params, int32_t* count);
ATTEND_API const char* attend_config_name(const attend_params* params, int32_t config);

/* Message of this thread's last call that did not return ATTEND_OK; "" if all did. */
ATTEND_API const char* attend_last_error(void);

/* Device memory for programs without the CUDA runtime; on the CPU, host memory. These functions
 * preserve the thread's current device. */

/* Number of GPUs that CUDA reports; 0, with ATTEND_OK, without a driver, a GPU or CUDA in this
 * build: attend_last_error() then says which. */
ATTEND_API int32_t attend_device_count(int32_t* count);

/* 256-byte aligned, uninitialised; NULL for 0 bytes. RESOURCE_EXHAUSTED if there is not enough. */
ATTEND_API int32_t attend_malloc(int32_t device, int64_t bytes, void** data);

/* May wait for the device. NULL is allowed. */
ATTEND_API int32_t attend_free(int32_t device, void* data);

/* Enqueues a copy on `stream`; `kind` is ATTEND_HOST_TO_DEVICE etc. Host memory must stay valid and
 * unchanged until attend_synchronize. */
ATTEND_API int32_t attend_memcpy(int32_t device, void* to, const void* from, int64_t bytes,
                                 int32_t kind, void* stream);

/* Enqueues a fill with the byte `value`, 0..255. */
ATTEND_API int32_t attend_memset(int32_t device, void* data, int32_t value, int64_t bytes,
                                 void* stream);

/* Waits until everything enqueued on `stream` has run, and returns its status. */
ATTEND_API int32_t attend_synchronize(int32_t device, void* stream);

#if defined(__cplusplus)
} /* extern "C" */
#endif

#endif /* ATTEND_KERNELS_ATTEND_C_H_ */
