// SPDX-License-Identifier: Apache-2.0
//
// For ThreadSanitizer builds only. Debian's gRPC and its libraries are not instrumented, and their
// locks (abseil's, on futexes) are invisible, so their memory accesses are ignored. This project's
// own code is checked completely: where it relies on gRPC to order two of its threads, that is
// annotated (client/rpc/connections.h).

#ifdef ATTEND_THREAD_SANITIZER

extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_suppressions();

extern "C" const char* __tsan_default_options() { return "ignore_noninstrumented_modules=1"; }

extern "C" const char* __tsan_default_suppressions() {
  return "race:libgrpc.so\n"
         "race:libgrpc++.so\n"
         "race:libgpr.so\n"
         "race:libabsl_\n"
         "race:grpc::internal::\n";
}

#endif
