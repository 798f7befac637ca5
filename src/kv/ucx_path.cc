#include "kv/ucx_path.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#if __has_include(<ucp/api/ucp.h>)
#include <dlfcn.h>
#include <ucp/api/ucp.h>

#include <cstdlib>
#include <mutex>
#include <thread>

#include "base/clock.h"
#endif

namespace perigee {

#if __has_include(<ucp/api/ucp.h>)
namespace {

// libucp's functions by name, so that no program needs it to start.
struct Library {
  decltype(&ucp_init_version) init_version = nullptr;
  decltype(&ucp_context_query) context_query = nullptr;
  decltype(&ucp_cleanup) cleanup = nullptr;
  decltype(&ucp_worker_create) worker_create = nullptr;
  decltype(&ucp_worker_destroy) worker_destroy = nullptr;
  decltype(&ucp_worker_get_address) worker_get_address = nullptr;
  decltype(&ucp_worker_release_address) worker_release_address = nullptr;
  decltype(&ucp_worker_progress) worker_progress = nullptr;
  decltype(&ucp_ep_create) ep_create = nullptr;
  decltype(&ucp_ep_close_nbx) ep_close = nullptr;
  decltype(&ucp_tag_send_nbx) tag_send = nullptr;
  decltype(&ucp_tag_recv_nbx) tag_recv = nullptr;
  decltype(&ucp_request_check_status) request_status = nullptr;
  decltype(&ucp_request_free) request_free = nullptr;
  decltype(&ucs_status_string) status_string = nullptr;
  std::string fault;  // why there is none
};

Library load() {
  // The process has its own words for a crash, and its memory is not watched.
  setenv("UCX_HANDLE_ERRORS", "none", 0);
  setenv("UCX_MEM_EVENTS", "n", 0);
  setenv("UCX_LOG_LEVEL", "fatal", 0);  // what fails is told once, by who asked for it
  Library library;
  void* handle = dlopen("libucp.so.0", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    library.fault = dlerror();
    return library;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (function == nullptr) library.fault = fmt::format("libucp.so.0 lacks {}", name);
  };
  find(library.init_version, "ucp_init_version");
  find(library.context_query, "ucp_context_query");
  find(library.cleanup, "ucp_cleanup");
  find(library.worker_create, "ucp_worker_create");
  find(library.worker_destroy, "ucp_worker_destroy");
  find(library.worker_get_address, "ucp_worker_get_address");
  find(library.worker_release_address, "ucp_worker_release_address");
  find(library.worker_progress, "ucp_worker_progress");
  find(library.ep_create, "ucp_ep_create");
  find(library.ep_close, "ucp_ep_close_nbx");
  find(library.tag_send, "ucp_tag_send_nbx");
  find(library.tag_recv, "ucp_tag_recv_nbx");
  find(library.request_status, "ucp_request_check_status");
  find(library.request_free, "ucp_request_free");
  find(library.status_string, "ucs_status_string");
  return library;
}

const Library& ucp() {
  static const Library library = load();
  return library;
}

Error failed(const char* what, ucs_status_t status) {
  return Error(Code::kUnavailable, fmt::format("UCX: {}: {}", what, ucp().status_string(status)));
}

// One for all paths of the process, as long as any is there: it opens the devices. Each path has a worker of its own,
// which one thread at a time uses. A libucp that was built without threads gets a context for each path.
Result<std::shared_ptr<ucp_context>> shared_context() {
  static std::mutex mutex;
  static std::weak_ptr<ucp_context> shared;
  const std::lock_guard lock(mutex);
  if (auto there = shared.lock()) return there;
  const ucp_params_t params{.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
                            .features = UCP_FEATURE_TAG,
                            .mt_workers_shared = 1};
  ucp_context_h made = nullptr;
  const ucs_status_t status = ucp().init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, nullptr, &made);
  if (status != UCS_OK) return failed("no context", status);
  std::shared_ptr<ucp_context> context(made, ucp().cleanup);
  ucp_context_attr_t attributes{.field_mask = UCP_ATTR_FIELD_THREAD_MODE};
  const bool known = ucp().context_query(made, &attributes) == UCS_OK;
  if (known && attributes.thread_mode == UCS_THREAD_MODE_MULTI) shared = context;
  return context;
}

constexpr ucp_tag_t kTag = 1, kWholeTag = ~ucp_tag_t{0};
constexpr double kAskEveryS = 0.005;  // is_over
constexpr double kCancelS = 1;
constexpr size_t kAddressRoom = size_t{64} << 10;  // more than an entry's one-byte lengths reach
constexpr int kSpins = 200;                        // without progress, before the core is left to others

}  // namespace

struct UcxPath::Impl {
  std::shared_ptr<ucp_context> context;
  ucp_worker_h worker = nullptr;
  ucp_ep_h endpoint = nullptr;
  bool notices_end = false;  // of the peer's process
  std::vector<uint8_t> address;

  ~Impl() { end(); }

  // Nothing is read or written after that.
  void end() {
    if (endpoint != nullptr && notices_end) {
      const ucp_request_param_t how{.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_EP_CLOSE_FLAG_FORCE};
      void* closing = ucp().ep_close(endpoint, &how);
      (void)wait(closing, kCancelS, {});
    }
    endpoint = nullptr;
    if (worker != nullptr) ucp().worker_destroy(std::exchange(worker, nullptr));
    context.reset();
  }

  // Progress until the request has ended; kUnavailable otherwise, and then it may be under way still.
  Status wait(void* request, double timeout_s, const IsOver& is_over) const {
    if (UCS_PTR_IS_ERR(request)) return failed("a transfer", UCS_PTR_STATUS(request));
    if (request == nullptr) return {};
    const double end_s = system_clock().now_s() + timeout_s;
    double ask_s = 0;
    for (int idle = 0;;) {
      const ucs_status_t status = ucp().request_status(request);
      if (status != UCS_INPROGRESS) {
        ucp().request_free(request);
        return status == UCS_OK ? Status() : Status(failed("a transfer", status));
      }
      idle = ucp().worker_progress(worker) > 0 ? 0 : idle + 1;
      if (idle < kSpins) continue;
      const double now_s = system_clock().now_s();
      if (now_s >= end_s) return Error(Code::kUnavailable, fmt::format("the peer was silent for {:g} s", timeout_s));
      if (is_over && now_s >= ask_s) {
        if (is_over()) return Error(Code::kUnavailable, "the connection is over");
        ask_s = now_s + kAskEveryS;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  // As wait(). Where that fails, the request is over when this returns, or with it the whole path.
  Status finish(void* request, double timeout_s, const IsOver& is_over) {
    Status status = wait(request, timeout_s, is_over);
    if (!status.ok()) end();  // ends what is under way, too
    return status;
  }
};

UcxPath::UcxPath(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
UcxPath::~UcxPath() = default;

Status UcxPath::check() {
  if (ucp().fault.empty()) return {};
  return Error(Code::kUnavailable, "UCX cannot be loaded: " + ucp().fault + "; install libucx0");
}

Result<std::unique_ptr<UcxPath>> UcxPath::create() {
  RETURN_IF_ERROR(check());
  auto impl = std::make_unique<Impl>();
  ASSIGN_OR_RETURN(impl->context, shared_context());
  const ucp_worker_params_t how{.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                .thread_mode = UCS_THREAD_MODE_SERIALIZED};
  ucs_status_t status = ucp().worker_create(impl->context.get(), &how, &impl->worker);
  if (status != UCS_OK) return failed("no worker", status);
  ucp_address_t* address = nullptr;
  size_t size = 0;
  status = ucp().worker_get_address(impl->worker, &address, &size);
  if (status != UCS_OK) return failed("no address", status);
  const auto* bytes = reinterpret_cast<const uint8_t*>(address);
  impl->address.assign(bytes, bytes + size);
  ucp().worker_release_address(impl->worker, address);
  return std::unique_ptr<UcxPath>(new UcxPath(std::move(impl)));
}

const std::vector<uint8_t>& UcxPath::address() const {
  return impl_->address;
}

Status UcxPath::connect(std::span<const uint8_t> address) {
  CHECK(impl_->endpoint == nullptr, "a path is connected once");
  if (impl_->worker == nullptr || address.empty()) return bad_input("UCX: no address", "blob");
  // The library is not told the size: an address that was cut short ends in zeros, and not in other memory.
  std::vector<uint8_t> padded(address.begin(), address.end());
  padded.resize(address.size() + kAddressRoom);
  // Transports that notice a peer's end are preferred: UCX 1.13's shared memory does not, and is taken where UCX_TLS
  // leaves nothing else. is_over and the time limits notice it then.
  ucs_status_t status = UCS_OK;
  for (const ucp_err_handling_mode_t mode : {UCP_ERR_HANDLING_MODE_PEER, UCP_ERR_HANDLING_MODE_NONE}) {
    const ucp_ep_params_t params{.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
                                               UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                 .address = reinterpret_cast<const ucp_address_t*>(padded.data()),
                                 .err_mode = mode,
                                 .err_handler = {.cb = [](void*, ucp_ep_h, ucs_status_t) {}, .arg = nullptr}};
    status = ucp().ep_create(impl_->worker, &params, &impl_->endpoint);
    impl_->notices_end = mode == UCP_ERR_HANDLING_MODE_PEER;
    if (status == UCS_OK) return {};
    impl_->endpoint = nullptr;
  }
  return failed("the peer cannot be reached", status);
}

Status UcxPath::send(std::span<const uint8_t> bytes, double timeout_s, const IsOver& is_over) {
  if (impl_->endpoint == nullptr) return Error(Code::kUnavailable, "UCX: the path is over");
  const ucp_request_param_t how{};
  return impl_->finish(ucp().tag_send(impl_->endpoint, bytes.data(), bytes.size(), kTag, &how), timeout_s, is_over);
}

Status UcxPath::receive(std::span<uint8_t> bytes, double timeout_s, const IsOver& is_over) {
  if (impl_->endpoint == nullptr) return Error(Code::kUnavailable, "UCX: the path is over");
  const ucp_request_param_t how{.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL};
  void* request = ucp().tag_recv(impl_->worker, bytes.data(), bytes.size(), kTag, kWholeTag, &how);
  return impl_->finish(request, timeout_s, is_over);
}

#else  // without its headers

struct UcxPath::Impl {
  std::vector<uint8_t> address;
};

UcxPath::UcxPath(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
UcxPath::~UcxPath() = default;

Status UcxPath::check() {
  return Error(Code::kUnavailable, "this program was built without UCX: build it where libucx-dev is installed");
}
Result<std::unique_ptr<UcxPath>> UcxPath::create() {
  return check().error();
}
const std::vector<uint8_t>& UcxPath::address() const {
  return impl_->address;
}
Status UcxPath::connect(std::span<const uint8_t>) {
  return check();
}
Status UcxPath::send(std::span<const uint8_t>, double, const IsOver&) {
  return check();
}
Status UcxPath::receive(std::span<uint8_t>, double, const IsOver&) {
  return check();
}

#endif

}  // namespace perigee
