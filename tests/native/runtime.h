// As much of XLA as calls of the kernels need: a pool of threads, a call's frame, and buffers of
// exactly their size, so that a sanitizer finds reads and writes beyond them.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  std::string message;
};

// A pool of threads, which is all that the kernels need of XLA's context.
struct XLA_FFI_ExecutionContext {
 public:
  explicit XLA_FFI_ExecutionContext(int num_threads) {
    for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { work(); });
  }

  ~XLA_FFI_ExecutionContext() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }

  void schedule(XLA_FFI_Task* task, void* data) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.emplace_back(task, data);
    }
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto [task, data] = tasks_.front();
      tasks_.pop_front();
      lock.unlock();
      task(data);
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<XLA_FFI_Task*, void*>> tasks_;
  bool ends_ = false;
  std::vector<std::thread> threads_;
};

using ThreadPool = XLA_FFI_ExecutionContext;

inline const XLA_FFI_Api* api() {
  static const XLA_FFI_Api made = [] {
    XLA_FFI_Api all{};
    all.struct_size = sizeof all;
    all.XLA_FFI_Error_Create = [](XLA_FFI_Error_Create_Args* args) {
      return new XLA_FFI_Error{args->message};
    };
    all.XLA_FFI_ThreadPool_Schedule = [](XLA_FFI_ThreadPool_Schedule_Args* args) {
      args->ctx->schedule(args->task, args->data);
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    all.XLA_FFI_ThreadPool_NumThreads = [](XLA_FFI_ThreadPool_NumThreads_Args* args) {
      *args->num_threads = args->ctx->num_threads();
      return static_cast<XLA_FFI_Error*>(nullptr);
    };
    return all;
  }();
  return &made;
}

template <class T>
constexpr XLA_FFI_DataType type_of() {
  if (std::is_same_v<T, float>) return XLA_FFI_DataType_F32;
  if (std::is_same_v<T, int32_t>) return XLA_FFI_DataType_S32;
  if (std::is_same_v<T, int64_t>) return XLA_FFI_DataType_S64;
  return std::is_same_v<T, bool> ? XLA_FFI_DataType_PRED : XLA_FFI_DataType_BF16;
}

// Memory of exactly so many bytes; nullptr for none.
struct Buffer {
  XLA_FFI_DataType type;
  std::vector<int64_t> dims;
  std::unique_ptr<char[]> bytes;
  size_t num_bytes;
  char* at;

  template <class T>
  static Buffer of(const std::vector<T>& values, std::vector<int64_t> dims) {
    const size_t size = values.size() * sizeof(T);
    Buffer made{type_of<T>(), std::move(dims), nullptr, size, nullptr};
    if (size == 0) return made;
    made.bytes.reset(new char[size]);
    made.at = made.bytes.get();
    std::memcpy(made.at, values.data(), size);
    return made;
  }

  template <class T>
  std::vector<T> values() const {
    std::vector<T> copy(num_bytes / sizeof(T));
    if (num_bytes) std::memcpy(copy.data(), at, num_bytes);
    return copy;
  }
};

// One call of a handler. Attributes are given in the order of their names.
class Call {
 public:
  Call& takes(const Buffer& buffer) { return add(buffer, args_); }
  Call& gives(const Buffer& buffer) { return add(buffer, rets_); }

  template <class T>
  Call& attr(const char* name, T value) {
    auto room = std::make_unique<int64_t>();
    std::memcpy(room.get(), &value, sizeof value);
    scalars_.push_back(std::make_unique<XLA_FFI_Scalar>(XLA_FFI_Scalar{type_of<T>(), room.get()}));
    names_.push_back(
        std::make_unique<XLA_FFI_ByteSpan>(XLA_FFI_ByteSpan{name, std::strlen(name)}));
    rooms_.push_back(std::move(room));
    return *this;
  }

  // Calls the handler: "" or the message of its error.
  std::string run(XLA_FFI_Handler* handler, ThreadPool& pool) {
    std::vector<XLA_FFI_ArgType> arg_types(args_.size(), XLA_FFI_ArgType_BUFFER);
    std::vector<XLA_FFI_RetType> ret_types(rets_.size(), XLA_FFI_RetType_BUFFER);
    std::vector<XLA_FFI_AttrType> attr_types(names_.size(), XLA_FFI_AttrType_SCALAR);
    auto args = pointers(args_), rets = pointers(rets_), attrs = pointers(scalars_);
    std::vector<XLA_FFI_ByteSpan*> names;
    for (const auto& name : names_) names.push_back(name.get());
    XLA_FFI_CallFrame frame{};
    frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
    frame.api = api();
    frame.ctx = &pool;
    frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
    frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, size(args), arg_types.data(), args.data()};
    frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, size(rets), ret_types.data(), rets.data()};
    frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr, size(attrs), attr_types.data(),
                   names.data(), attrs.data()};
    const std::unique_ptr<XLA_FFI_Error> error(handler(&frame));
    return error ? error->message : "";
  }

 private:
  using Buffers = std::vector<std::unique_ptr<XLA_FFI_Buffer>>;

  Call& add(const Buffer& buffer, Buffers& to) {
    XLA_FFI_Buffer made{};
    made.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    made.dtype = buffer.type;
    made.data = buffer.at;
    made.rank = static_cast<int64_t>(buffer.dims.size());
    made.dims = const_cast<int64_t*>(buffer.dims.data());
    to.push_back(std::make_unique<XLA_FFI_Buffer>(made));
    return *this;
  }

  template <class T>
  static std::vector<void*> pointers(const std::vector<std::unique_ptr<T>>& owned) {
    std::vector<void*> made;
    for (const auto& each : owned) made.push_back(each.get());
    return made;
  }

  static int64_t size(const std::vector<void*>& of) { return static_cast<int64_t>(of.size()); }

  Buffers args_, rets_;
  std::vector<std::unique_ptr<XLA_FFI_Scalar>> scalars_;
  std::vector<std::unique_ptr<XLA_FFI_ByteSpan>> names_;
  std::vector<std::unique_ptr<int64_t>> rooms_;
};
