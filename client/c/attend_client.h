/* SPDX-License-Identifier: Apache-2.0
 *
 * libattend_client.so: the client of an attend server as a plain C interface, for other languages.
 * It is the C++ library of client/client.h: its connections, chunks, retries with the server's
 * pushback, shared memory and sessions. The fields of a call are those of AttendRequest in
 * proto/attend/v1/attention.proto, which documents each field's meaning, default and bound.
 *
 * Errors. Every function that returns int32_t returns ATTEND_CLIENT_OK or a code whose numbers are
 * gRPC's; attend_client_last_error() then says, for the calling thread, which field, value and
 * bound. What becomes of a call is in its answer.
 *
 * Threads. Everything is thread-safe, but a handle is closed, freed or released once, when no other
 * thread uses it. `done` callbacks run on the client's own threads, or on the thread that starts
 * the call, before attend_client_start has returned; they must not block. Functions that wait for
 * the server (attend_client_prepare, _info, _health and those of sessions) wait for no `done`, so a
 * lock that a `done` takes may be held around them. A start that needs the answer of another call
 * (gradients without `o`, the first large call on a session if memory is shared) does wait for
 * other calls' `done`: hold no such lock around it. In a `done` it goes without that answer or
 * fails.
 *
 * Ownership. What a function gives out as T** is the caller's, until the function named beside it.
 * Structs and what they point to are read before a function returns, except tensor bytes: those
 * stay the caller's, are sent from where they are, and must be there, unchanged, until the call has
 * ended (attend_client_wait said so, or `done` ran). Tensors of an answer live until
 * attend_client_call_free.
 *
 * Structs begin with struct_bytes, their size as the caller knows it; another version's is refused.
 * Zero a struct, set struct_bytes, then what applies.
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

/* Element types. BIT is a bias's alone: a mask, eight keys to a byte from the lowest bit on, rows
 * that begin on bytes; 1 keeps the key. */
enum {
  ATTEND_CLIENT_FLOAT16 = 1,
  ATTEND_CLIENT_BFLOAT16 = 2,
  ATTEND_CLIENT_FLOAT32 = 3,
  ATTEND_CLIENT_BIT = 4
};
enum { ATTEND_CLIENT_BHLD = 1, ATTEND_CLIENT_BLHD = 2, ATTEND_CLIENT_LHD = 3 };
enum {
  ATTEND_CLIENT_MASK_NONE = 1,
  ATTEND_CLIENT_MASK_CAUSAL_BOTTOM_RIGHT = 2,
  ATTEND_CLIENT_MASK_CAUSAL_TOP_LEFT = 3,
  ATTEND_CLIENT_MASK_WINDOW_BOTTOM_RIGHT = 4,
  ATTEND_CLIENT_MASK_WINDOW_TOP_LEFT = 5
};
/* What a backward pass computes; a set of bits. */
enum {
  ATTEND_CLIENT_D_Q = 1,
  ATTEND_CLIENT_D_K = 2,
  ATTEND_CLIENT_D_V = 4,
  ATTEND_CLIENT_D_BIAS = 8,
  ATTEND_CLIENT_D_SINKS = 16
};
/* How tensors travel. AUTO: from 64 KiB on in memory that is shared with a server on this host, if
 * it shares any; else in one message, or by size in chunks over the connections. If q is in a GPU's
 * memory, and all else that is in one in the same, that shared memory is the GPU's (CUDA IPC),
 * where the server has that GPU and takes such memory; but not with `check`, on streams or on
 * sessions. */
enum {
  ATTEND_CLIENT_AUTO = 0,
  ATTEND_CLIENT_INLINE = 1,
  ATTEND_CLIENT_CHUNKED = 2,
  ATTEND_CLIENT_SHARED = 3 /* or FAILED_PRECONDITION */
};
enum { ATTEND_CLIENT_HEALTH_UNKNOWN = 0, ATTEND_CLIENT_SERVING = 1, ATTEND_CLIENT_NOT_SERVING = 2 };

typedef struct attend_client attend_client;
typedef struct attend_client_call attend_client_call;
typedef struct attend_client_stream attend_client_stream;
typedef struct attend_client_session attend_client_session;

typedef struct attend_client_options {
  uint64_t struct_bytes;
  const char* server;        /* HOST, HOST:PORT, [IPV6]:PORT, unix:PATH; NULL: 127.0.0.1:8001.
                              * Several, which calls go to in turn: IP addresses with commas
                              * between them, or a name with several addresses */
  const char* tenant;        /* of calls and sessions that name none; NULL: the default one */
  int32_t connections;       /* each with its own socket; in [1, 1024]; 0: 1 */
  int32_t attempts_max;      /* of a call, the first included; 1: no retries; 0: 5 */
  int64_t chunked_bytes_min; /* calls this large, answer included, go in chunks; 0: 16 MiB */
  int32_t shared_memory_off; /* not 0: AUTO never shares memory */
  const char* shared_memory_socket; /* where the server's is mounted; NULL: as the server says */
  /* Says who calls, where the server asks; NULL: the environment's ATTEND_TOKEN, if there is one.
   * Without TLS it goes to loopback and Unix sockets alone. */
  const char* token;
  const char* token_file; /* whose first line is the token; not with `token` */
  /* TLS over TCP. PEM files, read once; NULL: what $ATTEND_TLS_CA, $ATTEND_TLS_CERT,
   * $ATTEND_TLS_KEY and $ATTEND_TLS_SERVER_NAME say; "": none. */
  const char* tls_ca;          /* authorities of the server's certificate; "system": the system's */
  const char* tls_cert;        /* the client's, for servers that ask for one */
  const char* tls_key;         /* of tls_cert */
  const char* tls_server_name; /* for whom the server's must be; none: the host of `server` */
  /* The span (W3C Trace Context) that makes the calls, streams and sessions that name none. */
  const char* traceparent;
} attend_client_options;

/* C-contiguous and little-endian: the wire has no strides. */
typedef struct attend_client_tensor {
  const void* data; /* may be NULL where a dimension is 0 */
  int32_t dtype;    /* 0: there is no such tensor */
  int32_t dims;     /* in [1, 4] */
  int64_t shape[4]; /* of BIT in bits */
  int32_t memory;   /* 0: the host's; n: that of the CUDA device n - 1 */
  int32_t reserved;
} attend_client_tensor;

typedef struct attend_client_numbers {
  const int64_t* data;
  int64_t count; /* 0: not given */
} attend_client_numbers;

typedef struct attend_client_floats {
  const float* data;
  int64_t count; /* 0: not given */
} attend_client_floats;

/* Runs once, when the call has ended and its tensors are the caller's again. */
typedef void (*attend_client_done)(void* user);

/* One attention, or its backward pass. */
typedef struct attend_client_params {
  uint64_t struct_bytes;
  const char* request_id; /* NULL: the client makes one */
  /* By layout: BHLD [B, H, L, D], BLHD [B, L, H, D], LHD [rows of all sequences, H, D]. k has D of
   * q, v has Dv; both have the heads Hkv. */
  attend_client_tensor q, k, v;
  attend_client_tensor bias; /* [B|1, Hq|1, Lq|1, Lk], of any dtype */
  int32_t layout;            /* ATTEND_CLIENT_BHLD, ...; 0: BHLD */
  int32_t mask;              /* ATTEND_CLIENT_MASK_NONE, ...; 0: none */
  int64_t window_left;       /* visible keys before the diagonal, -1 = all; with a mask */
  int64_t window_right;      /* visible keys after the diagonal, -1 = all; with a window's mask */
  /* Keys of the whole before and after k's, which are a part of them, whose answers the caller
   * merges by their LSE; 0 and 0: all of them. */
  int64_t key_offset, keys_after;
  int32_t has_scale; /* 0: scale is 1/sqrt(D) */
  float scale;
  float softcap; /* 0: off */
  float dropout_p;
  uint64_t dropout_seed;
  attend_client_numbers q_lengths, kv_lengths; /* [B] true lengths, dense layouts */
  attend_client_numbers cu_q, cu_kv;           /* [B + 1] cumulative lengths, LHD */
  attend_client_floats alibi_slopes;           /* [Hq] or [B, Hq] */
  attend_client_floats sinks;                  /* [Hq] */
  int32_t return_lse;
  int32_t o_float32;  /* O in float32 whatever q's dtype is */
  int32_t check;      /* a reference check by the server; its report is in the answer */
  int32_t priority;   /* in [-100, 100] */
  const char* kernel; /* NULL: the server's choice */
  /* Not 0: the backward pass, with the O and LSE of the same attention and the loss's gradients by
   * them. If o has no dtype the client asks the server for the forward pass first, and waits. */
  int32_t wanted;                          /* ATTEND_CLIENT_D_Q | ... */
  int32_t transport;                       /* ATTEND_CLIENT_AUTO, ... */
  attend_client_tensor o, lse, d_o, d_lse; /* d_lse: none means 0 */
  int64_t timeout_ns;                      /* of all attempts together; 0: none */
  const char* tenant;                      /* NULL: the client's */
  attend_client_done done;                 /* may be NULL */
  void* user;
  /* A cudaStream_t or CUstream; NULL: the default stream. Tensors in a GPU's memory are read in its
   * order, so the caller need not wait for what writes them. */
  void* stream;
  const char* traceparent; /* the span that makes the call; NULL: the session's or the client's */
} attend_client_params;

typedef struct attend_client_answer {
  uint64_t struct_bytes;
  int32_t code;        /* ATTEND_CLIENT_OK: the rest is an answer */
  int32_t attempts;    /* 1: no retries */
  const char* message; /* why it failed; "" */
  /* Those that were asked for; data is the call's, or in shared memory: in a GPU's if the call's
   * tensors went that way. */
  attend_client_tensor o, lse, d_q, d_k, d_v, d_bias, d_sinks;
  /* Nanoseconds of the server's clock. */
  int64_t receive_ns, queue_ns, copy_in_ns, kernel_ns, copy_out_ns, check_ns, total_ns;
  int64_t batch_requests; /* in the batch that it ran in */
  const char* request_id;
  const char* kernel;
  const char* kernel_reason;
  const char* device;
  const char* transport; /* "inline", "chunked", "shm", "cuda-ipc" */
  int32_t checked;       /* 0: the fields of the check mean nothing */
  int32_t check_ok;
  int32_t check_undecided; /* check_ok is 0 for rows_unjudged alone: no judged row is wrong */
  int32_t reserved;
  int64_t rows_checked, rows_total, rows_wide, rows_unjudged;
  double max_abs_error, mean_abs_error, error_bound;
  const char* check_detail;              /* the first fault, "" */
  attend_client_numbers session_lengths; /* of each sequence's layer; with some failures too */
  int32_t sessions_ending;               /* the server is draining, they end with it */
} attend_client_answer;

/* Connects on first use. Close with attend_client_close. */
ATTEND_CLIENT_API int32_t attend_client_open(const attend_client_options* options,
                                             attend_client** client);
/* Refuses new calls, cancels what is unanswered, and waits until it has ended; from a `done`
 * callback it does not wait. Others may use the client meanwhile; it remains to be closed. */
ATTEND_CLIENT_API void attend_client_shut_down(attend_client* client);
/* As attend_client_shut_down, and frees the client. Its calls, sessions and streams remain to be
 * freed; sessions that are freed after it end with their lease. */
ATTEND_CLIENT_API void attend_client_close(attend_client* client);

/* Asks the server for its limits and its shared memory, and waits, unless it has answered before.
 * The first call of 64 KiB or more does so by itself. */
ATTEND_CLIENT_API int32_t attend_client_prepare(attend_client* client, int64_t timeout_ns);
/* What GetServerInfo says, as JSON with the names of the proto's fields; bytes in hexadecimal. Free
 * with attend_client_string_free. */
ATTEND_CLIENT_API int32_t attend_client_info(attend_client* client, int64_t timeout_ns,
                                             char** json);
/* grpc.health.v1 of the named service; "" or NULL: the server as a whole. */
ATTEND_CLIENT_API int32_t attend_client_health(attend_client* client, const char* service,
                                               int64_t timeout_ns, int32_t* health);
ATTEND_CLIENT_API void attend_client_string_free(char* text);

/* Memory that is shared with a server on this host: tensors in it at multiples of 256 bytes are not
 * copied. `memory`: 0: the host's, zero, page-aligned; n: that of the CUDA device n - 1, with
 * whatever was in it. FAILED_PRECONDITION: the server shares none with this process, or takes none
 * of that device. Free with attend_client_release, before the client is closed, when the caller's
 * own work on it is over; calls keep what they use. It stays until then, also if the client is shut
 * down or the server is another one. */
ATTEND_CLIENT_API int32_t attend_client_allocate(attend_client* client, int32_t memory,
                                                 int64_t bytes, void** data);
ATTEND_CLIENT_API int32_t attend_client_release(attend_client* client, void* data);

/* Starts a call and returns. An error is about the structs alone; all else is in the answer. Free
 * with attend_client_call_free. */
ATTEND_CLIENT_API int32_t attend_client_start(attend_client* client,
                                              const attend_client_params* params,
                                              attend_client_call** call);
/* Waits until the call has ended, or for timeout_ns (-1: however long). `ended` tells. */
ATTEND_CLIENT_API int32_t attend_client_wait(attend_client_call* call, int64_t timeout_ns,
                                             int32_t* ended);
/* The call ends soon, with CANCELLED or with what it had come to. A stream's ends here alone: the
 * server may compute it all the same, and its id stays taken until the server has answered it. If
 * it appends to sessions, the rows may be appended all the same: before the next call on that layer
 * the client asks the server for the lengths, and waits. */
ATTEND_CLIENT_API void attend_client_cancel(attend_client_call* call);
/* Of a call that has ended, else FAILED_PRECONDITION. */
ATTEND_CLIENT_API int32_t attend_client_get(const attend_client_call* call,
                                            attend_client_answer* answer);
/* Copies a tensor of the call's answer to memory of its size: the host's (0) or that of the CUDA
 * device to_memory - 1, which is the answer's own if that is in a GPU's memory. In the order of
 * `stream`; complete on return if either side is the host's. */
ATTEND_CLIENT_API int32_t attend_client_copy(attend_client_call* call,
                                             const attend_client_tensor* tensor, void* to,
                                             int32_t to_memory, void* stream);
/* The next user of the GPU memory that the answer is in waits there for what has been enqueued on
 * `stream` so far. For the caller's own work on the answer; attend_client_copy does it itself. */
ATTEND_CLIENT_API void attend_client_used(attend_client_call* call, void* stream);
/* Frees the answer. A call that has not ended goes on, and `done` runs. NULL is fine. The caller's
 * own work on an answer in a GPU's memory must be over, unless attend_client_used knows of it. */
ATTEND_CLIENT_API void attend_client_call_free(attend_client_call* call);

/* One AttendStream: many calls in flight on one connection, which are not retried. `tenant` and
 * `traceparent` may be NULL: the client's; and `server` too: any of several. Close with
 * attend_client_stream_close. */
ATTEND_CLIENT_API int32_t attend_client_stream_open(attend_client* client, const char* tenant,
                                                    const char* traceparent, const char* server,
                                                    int64_t timeout_ns,
                                                    attend_client_stream** stream);
/* As attend_client_start; the call's timeout, tenant, traceparent and transport do not count. */
ATTEND_CLIENT_API int32_t attend_client_stream_start(attend_client_stream* stream,
                                                     const attend_client_params* params,
                                                     attend_client_call** call);
/* Ends the requests, and waits until all are answered. */
ATTEND_CLIENT_API int32_t attend_client_stream_finish(attend_client_stream* stream);
/* Refuses new calls, and cancels what is unanswered. From a `done` callback it does not wait. Other
 * threads may use the stream meanwhile; it remains to be closed. */
ATTEND_CLIENT_API void attend_client_stream_cancel(attend_client_stream* stream);
/* As attend_client_stream_cancel, and frees the stream. */
ATTEND_CLIENT_API void attend_client_stream_close(attend_client_stream* stream);

/* The shape of a layer's K, [heads_kv, tokens, dim], and V, [heads_kv, tokens, dim_v]. */
typedef struct attend_client_layer_shape {
  int32_t dtype; /* 0: ATTEND_CLIENT_FLOAT32 */
  int32_t reserved;
  int64_t heads_kv;
  int64_t dim;
  int64_t dim_v; /* 0: dim */
} attend_client_layer_shape;

typedef struct attend_client_session_options {
  uint64_t struct_bytes;
  const attend_client_layer_shape* shapes; /* each layer's, or one for all */
  int64_t shapes_count;
  int32_t layers;          /* 0: as many as there are shapes */
  int32_t pinned;          /* not 0: loses no tokens to other sessions */
  const char* device;      /* "cuda:0" or "cpu"; NULL: the server chooses */
  const char* tenant;      /* NULL: the client's */
  double lease_seconds;    /* from the last use; 0: the server's default */
  int64_t timeout_ns;      /* of each call but attentions; 0: 10 s */
  const char* traceparent; /* the span that makes the calls on it; NULL: the client's */
  const char* server;      /* of several, the one to be on, HOST:PORT; NULL: any that serves */
} attend_client_session_options;

/* K and V of a sequence that stay on the server; client/session.h documents what they do. Functions
 * of sessions wait for the server. One call at a time on a layer. */
ATTEND_CLIENT_API int32_t attend_client_session_create(attend_client* client,
                                                       const attend_client_session_options* options,
                                                       attend_client_session** session);
/* One that was made elsewhere, by its id as attend_client_session_id has it. */
ATTEND_CLIENT_API int32_t attend_client_session_open(attend_client* client, const char* id,
                                                     const attend_client_session_options* options,
                                                     attend_client_session** session);
/* The tenant's sessions as JSON, as attend_client_info. */
ATTEND_CLIENT_API int32_t attend_client_session_list(attend_client* client, const char* tenant,
                                                     int64_t timeout_ns, char** json);
/* Another session with the same first `length` tokens; -1: all, which all layers must have. */
ATTEND_CLIENT_API int32_t attend_client_session_fork(const attend_client_session* session,
                                                     int64_t length, attend_client_session** fork);
ATTEND_CLIENT_API int32_t attend_client_session_truncate(attend_client_session* session,
                                                         int64_t length);
ATTEND_CLIENT_API int32_t attend_client_session_keep_alive(attend_client_session* session);
/* What the server says of it, as JSON; learns the lengths. */
ATTEND_CLIENT_API int32_t attend_client_session_get(attend_client_session* session, char** json);
/* 32 hexadecimal digits, and @HOST:PORT, its server, if the client has several. Valid as long as
 * the session is there. */
ATTEND_CLIENT_API const char* attend_client_session_id(const attend_client_session* session);
ATTEND_CLIENT_API int32_t attend_client_session_layers(const attend_client_session* session);
/* Tokens of the layer, those of the last answer included; -1 if there is no such layer. */
ATTEND_CLIENT_API int64_t attend_client_session_length(const attend_client_session* session,
                                                       int32_t layer);
/* Starts an attention over a layer's tokens, one session for each of the B sequences. k and v are
 * the rows to be appended before q reads them, or neither is given; a q of no rows only appends.
 * `stream` may be NULL. All sessions and the stream are of one client. */
ATTEND_CLIENT_API int32_t attend_client_session_start(attend_client_session* const* sessions,
                                                      int32_t count, int32_t layer,
                                                      attend_client_stream* stream,
                                                      const attend_client_params* params,
                                                      attend_client_call** call);
/* Ends the session on the server, once no other thread is in a function of it; the handle remains
 * to be freed. */
ATTEND_CLIENT_API int32_t attend_client_session_end(attend_client_session* session);
/* Frees the handle, and ends the session if it was made here and `keep` is 0. */
ATTEND_CLIENT_API void attend_client_session_free(attend_client_session* session, int32_t keep);

/* The message of the last function on this thread that did not return ATTEND_CLIENT_OK; "" if all
 * did. */
ATTEND_CLIENT_API const char* attend_client_last_error(void);

#if defined(__cplusplus)
} /* extern "C" */
#endif

#endif /* ATTEND_CLIENT_ATTEND_CLIENT_H_ */
