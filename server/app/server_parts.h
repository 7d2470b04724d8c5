// SPDX-License-Identifier: Apache-2.0
//
// The headers of Server's members, for its own sources; server.h only declares them.

#pragma once

#include "server/app/accepting.h"
#include "server/app/callers.h"
#include "server/app/dump.h"
#include "server/app/grpc_server.h"
#include "server/app/metrics_endpoint.h"
#include "server/engine/engine.h"
#include "server/log/access_log.h"
#include "server/oip/inference_service.h"
#include "server/regions/shared_memory_server.h"
#include "server/rpc/admin_service.h"
#include "server/rpc/attention_service.h"
#include "server/rpc/call_queue.h"
#include "server/rpc/call_table.h"
#include "server/rpc/chunked_registry.h"
#include "server/rpc/health_service.h"
#include "server/rpc/load_report.h"
#include "server/rpc/reflection.h"
#include "server/rpc/request_reader.h"
#include "server/rpc/session_service.h"
#include "server/sessions/session_memory.h"
#include "server/trace/tracer.h"
#include "server/transport/block_pool.h"
#include "server/util/worker_threads.h"
