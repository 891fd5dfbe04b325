// A pretend accelerator for torch: memory of the host, streams that are threads, kernels that run late. One source, one call of g++.
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include "kernels.h"

namespace simgpu {

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &Allocator::instance());
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &PinnedAllocator::instance());
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
static const int hooks_are_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return 0;
}();

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;
using Pin = std::optional<bool>;

static Tensor empty(at::IntArrayRef sizes, Dtype dtype, Layout, MaybeDevice, Pin, std::optional<at::MemoryFormat> format) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &Allocator::instance(), keys, c10::dtype_or_default(dtype), format);
}
static Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, Dtype dtype, Layout, MaybeDevice, Pin) {
  auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &Allocator::instance(), keys, c10::dtype_or_default(dtype));
}
static Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_any(from, to, false);
}
static at::Scalar item(const Tensor& tensor) {
  synchronise(current(), current()->last(), "item");
  return at::native::_local_scalar_dense_cpu(on_cpu(tensor));
}
static Tensor as_strided(const Tensor& t, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  auto plain = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), plain);
}
static const Tensor& resize(const Tensor& t, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(t, C10_AS_INTARRAYREF_SLOW(sizes), format);
}
static Tensor reshape_alias(const Tensor& t, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
static Tensor view(const Tensor& t, c10::SymIntArrayRef sizes) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(sizes)); }
static Tensor unfold(const Tensor& t, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(t, dim, size, step); }
static Tensor& set_storage(Tensor& t, at::Storage storage) { return at::native::set_(t, storage); }
static Tensor& set_tensor(Tensor& t, const Tensor& source) { return at::native::set_tensor_(t, source); }
static Tensor& set_range(Tensor& t, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::native::set_storage_cpu_(t, storage, offset, sizes, strides);
}
static void record_stream(Tensor& t, c10::Stream stream) { Allocator::instance().recordStream(t.storage().data_ptr(), stream); }

// On a real device these are one kernel each; torch would take them apart here, and the counts would be of nothing real.
static bool is_one_kernel(const c10::OperatorName& name) {
  static const std::set<std::string> more = {"aten::_chunk_cat", "aten::split_with_sizes_copy", "aten::native_layer_norm"};
  return more.count(name.name) || (name.name.rfind("aten::_foreach_", 0) == 0 && name.name != "aten::_foreach_copy_" &&
                                   name.name != "aten::_foreach_copy");
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("resize_", resize);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("unfold", unfold);
  library.impl("_copy_from", copy_any);
  library.impl("_copy_from_and_resize", copy_and_resize);
  library.impl("_local_scalar_dense", item);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage_storage_offset", set_range);
  library.impl("record_stream", record_stream);
  library.impl("_foreach_copy_", copy_each);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames())
    if (is_one_kernel(name)) {
      auto full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_anything>());
    }
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_anything>()); }

}  // namespace simgpu

PYBIND11_MODULE(_simgpu, module) {
  namespace py = pybind11;
  using simgpu::counters;
  module.def("set_paces", [](std::pair<bool, int> of_default, const std::vector<std::pair<bool, int>>& of_others) {
    auto pace = [](std::pair<bool, int> one) { return simgpu::Pace{one.first, one.second}; };
    std::vector<simgpu::Pace> others;
    for (auto& one : of_others) others.push_back(pace(one));
    simgpu::streams().set_paces(pace(of_default), others);
  });
  module.def("synchronize", [] {
    py::gil_scoped_release no_gil;
    simgpu::Guard().synchronizeDevice(0);
  });
  // A kernel in Python, for collectives.
  module.def("launch", [](int64_t stream, py::object kernel) {
    auto held = std::make_shared<py::object>(std::move(kernel));
    auto run = [held]() mutable {
      py::gil_scoped_acquire gil;
      try {
        (*held)();
      } catch (py::error_already_set& error) {
        std::string text = error.what();
        *held = py::object();
        held.reset();
        throw std::runtime_error(text);
      }
      *held = py::object();
      held.reset();
    };
    simgpu::streams().at(stream)->launch(std::move(run));
  });
  module.def("set_patience", [](int64_t milliseconds) { simgpu::patience_ms() = milliseconds; });
  module.def("pack_blocks", [] { simgpu::Allocator::instance().pack(); });
  module.def("pinned", [] { return simgpu::PinnedAllocator::instance().counts(); });
  module.def("reset_pinned", [] { simgpu::PinnedAllocator::instance().reset_peak_stats(); });
  module.def("on_cpu", [](const at::Tensor& tensor) { return simgpu::on_cpu(tensor); });
  module.def("counts", [] {
    std::lock_guard<std::mutex> lock(counters().mutex);
    return std::make_tuple(counters().launches, counters().synchronisations, counters().pageable_copies);
  });
  module.def("stalls", [] {
    std::lock_guard<std::mutex> lock(counters().mutex);
    return counters().stalls;
  });
  module.def("reset_counts", [] {
    std::lock_guard<std::mutex> lock(counters().mutex);
    counters().stalls.clear();
    counters().launches.clear();
    counters().synchronisations.clear();
    counters().pageable_copies.clear();
  });
}
