/* SPDX-License-Identifier: Apache-2.0
 *
 * libattend_client.so: the client of an attend server as a plain C interface, for other languages.
 * It wraps the C++ library of client/client.h: connections, chunks, retries with the server's
 * pushback, shared memory and sessions. A call is an AttendRequest as text, and tensors;
 * proto/attend/v1/attention.proto documents meaning, default and bound of each field.
 *
 * Errors. Every function that returns int32_t returns ATTEND_CLIENT_OK or a code with gRPC's
 * number; attend_client_last_error() then names, for the calling thread, the field, value and
 * bound. The outcome of a call is in its answer.
 *
 * Threads. Everything is thread-safe, except that a handle is closed, freed or released once, when
 * no other thread uses it. `done` callbacks run on the client's threads, or on the thread that
 * starts the call, before attend_client_start has returned; they must not block. Functions that
 * wait for the server (attend_client_prepare, _info, _health and those of sessions) do not wait
 * for any `done`, so the caller may hold a lock around them that a `done` takes. A start that
 * needs another call's answer first (gradients without `o`, the first large call on a session if
 * memory is shared) does wait for other calls' `done`: hold no such lock around it. Inside a
 * `done`, such a start does without that answer or fails.
 *
 * Ownership. A handle or pointer returned through T** belongs to the caller, until the function
 * named beside it. Structs and their pointers are read before a function returns, except tensor
 * bytes: they remain the caller's, are sent without a copy, and must stay unchanged until the call
 * has ended (attend_client_wait said so, or `done` ran). Tensors of an answer live until
 * attend_client_call_free.
 *
 * Structs begin with struct_bytes, their size as the caller was compiled; another version's is
 * refused. Zero a struct, then set struct_bytes and the fields that apply.
 */

#ifndef ATTEND_CLIENT_ATTEND_CLIENT_H_
#define ATTEND_CLIENT_ATTEND_CLIENT_H_

#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif

#if defined(__GNUC__)
#define ATTEND_CLIENT_API __attribute__((visibility("default")))
#else
#define ATTEND_CLIENT_API
#endif

enum {
  ATTEND_CLIENT_OK = 0,
  ATTEND_CLIENT_CANCELLED = 1,
  ATTEND_CLIENT_INVALID_ARGUMENT = 3,
  ATTEND_CLIENT_DEADLINE_EXCEEDED = 4,
  ATTEND_CLIENT_NOT_FOUND = 5,
  ATTEND_CLIENT_RESOURCE_EXHAUSTED = 8,
  ATTEND_CLIENT_FAILED_PRECONDITION = 9,
  ATTEND_CLIENT_OUT_OF_RANGE = 11,
  ATTEND_CLIENT_UNIMPLEMENTED = 12,
  ATTEND_CLIENT_INTERNAL = 13,
  ATTEND_CLIENT_UNAVAILABLE = 14
};

/* Element types. BIT is for a bias and a tree only: a mask, eight keys per byte, lowest bit first;
 * rows begin on byte boundaries; 1 keeps the key. */
enum {
  ATTEND_CLIENT_FLOAT16 = 1,
  ATTEND_CLIENT_BFLOAT16 = 2,
  ATTEND_CLIENT_FLOAT32 = 3,
  ATTEND_CLIENT_BIT = 4
};
/* How tensors are sent. AUTO: calls of 64 KiB or more use memory shared with a server on this host,
 * if it shares any; others go in one message, or in chunks if they are large. If q and every other
 * tensor in GPU memory are on one GPU, the shared memory is that GPU's (CUDA IPC), provided that
 * the server uses that GPU and has CUDA IPC on; but not with `check`, on streams or on sessions. */
enum {
  ATTEND_CLIENT_AUTO = 0,
  ATTEND_CLIENT_INLINE = 1,
  ATTEND_CLIENT_CHUNKED = 2,
  ATTEND_CLIENT_SHARED = 3 /* fails with FAILED_PRECONDITION without it */
};
enum { ATTEND_CLIENT_HEALTH_UNKNOWN = 0, ATTEND_CLIENT_SERVING = 1, ATTEND_CLIENT_NOT_SERVING = 2 };

typedef struct attend_client attend_client;
typedef struct attend_client_call attend_client_call;
typedef struct attend_client_stream attend_client_stream;
typedef struct attend_client_session attend_client_session;

typedef struct attend_client_options {
  uint64_t struct_bytes;
  const char* server;        /* HOST, HOST:PORT, [IPV6]:PORT, unix:PATH; NULL: 127.0.0.1:8001.
                              * Several servers, to which calls go in turn: comma-separated IP
                              * addresses, or a name with several addresses */
  const char* tenant;        /* of calls and sessions that set none; NULL: the default one */
  int32_t connections;       /* each with its own socket; in [1, 1024]; 0: 1 */
  int32_t attempts_max;      /* per call, the first included; 1: no retries; 0: 5 */
  int64_t chunked_bytes_min; /* calls this large, answer included, go in chunks; 0: 16 MiB */
  int32_t shared_memory_off; /* not 0: AUTO never shares memory */
  const char* shared_memory_socket; /* its path in this process; NULL: as the server reports */
  /* The caller's credential, for servers that authenticate; NULL: the environment's ATTEND_TOKEN,
   * if set. Without TLS it is sent to loopback and Unix sockets only. */
  const char* token;
  const char* token_file; /* file with the token in its first line; not with `token` */
  /* TLS over TCP. PEM files, read once; NULL: the value of $ATTEND_TLS_CA, $ATTEND_TLS_CERT,
   * $ATTEND_TLS_KEY or $ATTEND_TLS_SERVER_NAME; "": none. */
  const char* tls_ca;          /* authorities of the server's certificate; "system": the system's */
  const char* tls_cert;        /* the client's certificate, if the server requires one */
  const char* tls_key;         /* of tls_cert */
  const char* tls_server_name; /* name in the server's certificate; none: `server`'s host */
  /* The span (W3C Trace Context) of calls, streams and sessions that set none. */
  const char* traceparent;
} attend_client_options;

/* C-contiguous and little-endian: the wire has no strides. */
typedef struct attend_client_tensor {
  const void* data; /* may be NULL if a dimension is 0 */
  int32_t dtype;    /* 0: no tensor */
  int32_t dims;     /* in [1, 4] */
  int64_t shape[4]; /* for BIT in bits */
  int32_t memory;   /* 0: host; n: CUDA device n - 1 */
  int32_t reserved;
} attend_client_tensor;

typedef struct attend_client_numbers {
  const int64_t* data;
  int64_t count; /* 0: not given */
} attend_client_numbers;

/* A list of the request that is given from memory instead of as text. */
typedef struct attend_client_list {
  const char* name; /* a repeated field of AttendRequest: "kv_lengths", "sinks", ... */
  const void* data; /* int64_t or float, as the field's elements */
  int64_t count;
} attend_client_list;

/* Runs once, when the call has ended and no longer uses the caller's tensors. */
typedef void (*attend_client_done)(void* user);

/* One attention, or its backward pass. */
typedef struct attend_client_params {
  uint64_t struct_bytes;
  /* AttendRequest in Protobuf's text format; NULL: all defaults.
   *   mask { kind: KIND_CAUSAL_BOTTOM_RIGHT window_left: 127 } return_lse: true sinks: [0.5, -inf]
   * Tensors and tree_tokens come from the fields below, sessions from
   * attend_client_session_start. With `backward {}`, or with `wanted` in it, the call is the
   * backward pass. */
  const char* request;
  const attend_client_list* lists; /* each replaces the request's of that name */
  int64_t lists_count;
  /* By layout: BHLD [B, H, L, D], BLHD [B, L, H, D], LHD [rows of all sequences, H, D]. k has q's
   * D, v has Dv; both have Hkv heads. */
  attend_client_tensor q, k, v;
  attend_client_tensor bias; /* [B|1, Hq|1, Lq|1, Lk], of any dtype */
  attend_client_tensor tree; /* [B|1, T, T] of BIT in host memory: the mask of a draft, each
                              * sequence's last queries and keys; not with a bias */
  /* For the backward pass: O and LSE of the same attention and the loss's gradients with respect to
   * them. If o has no dtype, the client first asks the server for the forward pass, and waits. */
  attend_client_tensor o, lse, d_o, d_lse; /* d_lse without dtype: 0 */
  int32_t transport;                       /* ATTEND_CLIENT_AUTO, ... */
  int64_t timeout_ns;                      /* of all attempts together; 0: none */
  const char* tenant;                      /* NULL: the client's */
  attend_client_done done;                 /* may be NULL */
  void* user;
  /* A cudaStream_t or CUstream; NULL: the default stream. Tensors in GPU memory are read in stream
   * order, so the caller need not wait for the work that writes them. */
  void* stream;
  const char* traceparent; /* the calling span; NULL: the session's or the client's */
} attend_client_params;

typedef struct attend_client_answer {
  uint64_t struct_bytes;
  int32_t code;        /* ATTEND_CLIENT_OK: the fields below are an answer */
  int32_t attempts;    /* 1: no retries */
  const char* message; /* why it failed, or "" */
  /* The requested tensors. Their data belongs to the call or is in shared memory: in a GPU's if the
   * call's tensors were sent that way. */
  attend_client_tensor o, lse, d_q, d_k, d_v, d_bias, d_sinks;
  /* Nanoseconds of the server's clock. */
  int64_t receive_ns, queue_ns, copy_in_ns, kernel_ns, copy_out_ns, check_ns, total_ns;
  int64_t batch_requests; /* requests in the batch it ran in */
  const char* request_id;
  const char* kernel;
  const char* kernel_reason;
  const char* device;
  const char* transport; /* "inline", "chunked", "shm", "cuda-ipc" */
  int32_t checked;       /* 0: the check fields are meaningless */
  int32_t check_ok;
  int32_t check_undecided; /* check_ok is 0 because of rows_unjudged only: no row is wrong */
  int32_t reserved;
  int64_t rows_checked, rows_total, rows_wide, rows_unjudged;
  double max_abs_error, mean_abs_error, error_bound;
  const char* check_detail;              /* the worst fault, or "" */
  attend_client_numbers session_lengths; /* of each sequence's layer; with some failures too */
  int32_t sessions_ending;               /* the server is draining: sessions will end */
} attend_client_answer;

/* Connects on first use. Close with attend_client_close. */
ATTEND_CLIENT_API int32_t attend_client_open(const attend_client_options* options,
                                             attend_client** client);
/* Refuses new calls, cancels unanswered ones, and waits until they have ended; inside a `done` it
 * does not wait. Other threads may be using the client; it must still be closed. */
ATTEND_CLIENT_API void attend_client_shut_down(attend_client* client);
/* As attend_client_shut_down, and frees the client. Its calls, sessions and streams must still be
 * freed; sessions freed later end with their lease. */
ATTEND_CLIENT_API void attend_client_close(attend_client* client);

/* Asks the server for its limits and shared memory, and waits, unless it has answered before. The
 * first call of 64 KiB or more does so itself. */
ATTEND_CLIENT_API int32_t attend_client_prepare(attend_client* client, int64_t timeout_ns);
/* GetServerInfo's answer as JSON with the .proto's field names; bytes in hexadecimal. Free with
 * attend_client_string_free. */
ATTEND_CLIENT_API int32_t attend_client_info(attend_client* client, int64_t timeout_ns,
                                             char** json);
/* grpc.health.v1 of the named service; "" or NULL: the server as a whole. */
ATTEND_CLIENT_API int32_t attend_client_health(attend_client* client, const char* service,
                                               int64_t timeout_ns, int32_t* health);
ATTEND_CLIENT_API void attend_client_string_free(char* text);

/* Memory shared with a server on this host: tensors in it at multiples of 256 bytes are not copied.
 * `memory`: 0: host memory, zeroed, page-aligned; n: memory of CUDA device n - 1, with arbitrary
 * contents. FAILED_PRECONDITION: the server shares none with this process, or does not use that
 * device. Free with attend_client_release, before the client is closed and after the caller's own
 * work on it has ended; calls in flight keep what they use. Until then it stays valid, even if the
 * client is shut down or the server is replaced. */
ATTEND_CLIENT_API int32_t attend_client_allocate(attend_client* client, int32_t memory,
                                                 int64_t bytes, void** data);
ATTEND_CLIENT_API int32_t attend_client_release(attend_client* client, void* data);

/* Starts a call and returns. A returned error concerns the structs only; other failures are in the
 * answer. Free with attend_client_call_free. */
ATTEND_CLIENT_API int32_t attend_client_start(attend_client* client,
                                              const attend_client_params* params,
                                              attend_client_call** call);
/* Waits until the call has ended (`ended` is 1), at most timeout_ns; -1: no limit. */
ATTEND_CLIENT_API int32_t attend_client_wait(attend_client_call* call, int64_t timeout_ns,
                                             int32_t* ended);
/* Ends the call soon, with CANCELLED or with the answer that it already has. A stream's call is
 * cancelled on this side only: the server may still compute it, and its id stays in use until the
 * server has answered it. A call that appends to sessions may still append its rows: before the
 * next call on that layer the client asks the server for the lengths, and waits. */
ATTEND_CLIENT_API void attend_client_cancel(attend_client_call* call);
/* Fills in the answer of a call that has ended; FAILED_PRECONDITION before that. */
ATTEND_CLIENT_API int32_t attend_client_get(const attend_client_call* call,
                                            attend_client_answer* answer);
/* Copies a tensor of the call's answer to memory of its size: host memory (0) or that of CUDA
 * device to_memory - 1, which must be the answer's own device if the answer is in GPU memory. Runs
 * in the order of `stream`; complete on return if either side is host memory. */
ATTEND_CLIENT_API int32_t attend_client_copy(attend_client_call* call,
                                             const attend_client_tensor* tensor, void* to,
                                             int32_t to_memory, void* stream);
/* Makes the next user of the answer's GPU memory wait there for the work enqueued on `stream` so
 * far. For the caller's own work on the answer; attend_client_copy does this itself. */
ATTEND_CLIENT_API void attend_client_used(attend_client_call* call, void* stream);
/* Frees the answer. A call that has not ended continues, and `done` runs. NULL is allowed. The
 * caller's own work on an answer in GPU memory must have ended, unless announced by
 * attend_client_used. */
ATTEND_CLIENT_API void attend_client_call_free(attend_client_call* call);

/* One AttendStream: many calls in flight on one connection, without retries. NULL `tenant` and
 * `traceparent`: the client's; NULL `server`: any. Close with attend_client_stream_close. */
ATTEND_CLIENT_API int32_t attend_client_stream_open(attend_client* client, const char* tenant,
                                                    const char* traceparent, const char* server,
                                                    int64_t timeout_ns,
                                                    attend_client_stream** stream);
/* As attend_client_start; the call's timeout, tenant, traceparent and transport are ignored. */
ATTEND_CLIENT_API int32_t attend_client_stream_start(attend_client_stream* stream,
                                                     const attend_client_params* params,
                                                     attend_client_call** call);
/* Half-closes the stream and waits until all its calls are answered. */
ATTEND_CLIENT_API int32_t attend_client_stream_finish(attend_client_stream* stream);
/* Refuses new calls and cancels unanswered ones. Inside a `done` it does not wait for them. Other
 * threads may be using the stream; it must still be closed. */
ATTEND_CLIENT_API void attend_client_stream_cancel(attend_client_stream* stream);
/* As attend_client_stream_cancel, and frees the stream. */
ATTEND_CLIENT_API void attend_client_stream_close(attend_client_stream* stream);

/* Shape of a layer's K, [heads_kv, tokens, dim], and V, [heads_kv, tokens, dim_v]. */
typedef struct attend_client_layer_shape {
  int32_t dtype; /* 0: ATTEND_CLIENT_FLOAT32 */
  int32_t reserved;
  int64_t heads_kv;
  int64_t dim;
  int64_t dim_v; /* 0: dim */
} attend_client_layer_shape;

typedef struct attend_client_session_options {
  uint64_t struct_bytes;
  const attend_client_layer_shape* shapes; /* one per layer, or one for all */
  int64_t shapes_count;
  int32_t layers;          /* 0: shapes_count */
  int32_t pinned;          /* not 0: its tokens are not evicted for other sessions */
  const char* device;      /* "cuda:0" or "cpu"; NULL: the server chooses */
  const char* tenant;      /* NULL: the client's */
  double lease_seconds;    /* counted from the last use; 0: the server's default */
  int64_t timeout_ns;      /* of each call but attention; 0: 10 s */
  const char* traceparent; /* the span of its calls; NULL: the client's */
  const char* server;      /* of several, the one to use, HOST:PORT; NULL: any that serves */
} attend_client_session_options;

/* K and V of a sequence, kept on the server; client/session.h documents the operations. Functions
 * of sessions wait for the server. One call at a time per layer. */
ATTEND_CLIENT_API int32_t attend_client_session_create(attend_client* client,
                                                       const attend_client_session_options* options,
                                                       attend_client_session** session);
/* Opens an existing session, by its id as attend_client_session_id returns it. */
ATTEND_CLIENT_API int32_t attend_client_session_open(attend_client* client, const char* id,
                                                     const attend_client_session_options* options,
                                                     attend_client_session** session);
/* The tenant's sessions as JSON, as attend_client_info. */
ATTEND_CLIENT_API int32_t attend_client_session_list(attend_client* client, const char* tenant,
                                                     int64_t timeout_ns, char** json);
/* Another session with the same first `length` tokens; -1: all, if all layers are equally long. */
ATTEND_CLIENT_API int32_t attend_client_session_fork(const attend_client_session* session,
                                                     int64_t length, attend_client_session** fork);
ATTEND_CLIENT_API int32_t attend_client_session_truncate(attend_client_session* session,
                                                         int64_t length);
/* Keeps, of a draft that begins after `length` tokens, those whose indices are `kept`, ascending
 * and counted from 0: they move up to follow these tokens, and the rest is removed. */
ATTEND_CLIENT_API int32_t attend_client_session_keep_draft(attend_client_session* session,
                                                           int64_t length, const int64_t* kept,
                                                           int64_t count);
ATTEND_CLIENT_API int32_t attend_client_session_keep_alive(attend_client_session* session);
/* The session's state as JSON; updates the lengths. */
ATTEND_CLIENT_API int32_t attend_client_session_get(attend_client_session* session, char** json);
/* 32 hexadecimal digits, followed by @HOST:PORT, its server, if the client has several. Valid until
 * the handle is freed. */
ATTEND_CLIENT_API const char* attend_client_session_id(const attend_client_session* session);
ATTEND_CLIENT_API int32_t attend_client_session_layers(const attend_client_session* session);
/* Tokens of the layer as of the last answer; -1: no such layer. */
ATTEND_CLIENT_API int64_t attend_client_session_length(const attend_client_session* session,
                                                       int32_t layer);
/* Starts an attention over a layer's tokens, with one session per sequence (B). k and v are the
 * rows to append before q reads them, or both unset; a q without rows only appends. `stream` may be
 * NULL. All sessions and the stream must be of one client. */
ATTEND_CLIENT_API int32_t attend_client_session_start(attend_client_session* const* sessions,
                                                      int32_t count, int32_t layer,
                                                      attend_client_stream* stream,
                                                      const attend_client_params* params,
                                                      attend_client_call** call);
/* Ends the session on the server, once no other thread is in a function of it; the handle must
 * still be freed. */
ATTEND_CLIENT_API int32_t attend_client_session_end(attend_client_session* session);
/* Frees the handle; also ends the session if it was made here and `keep` is 0. */
ATTEND_CLIENT_API void attend_client_session_free(attend_client_session* session, int32_t keep);

/* The message of the last function on this thread that did not return ATTEND_CLIENT_OK; "" if none
 * failed. */
ATTEND_CLIENT_API const char* attend_client_last_error(void);

#if defined(__cplusplus)
} /* extern "C" */
#endif

#endif /* ATTEND_CLIENT_ATTEND_CLIENT_H_ */
