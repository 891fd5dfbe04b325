// Owns how operators run: shapes by torch's meta kernels when they are launched, values by its CPU kernels when their turn comes.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>
#include <memory>
#include "device.h"

namespace simgpu {

using at::Tensor;
using Values = std::vector<c10::IValue>;

inline bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

inline at::TensorOptions like(const Tensor& tensor, c10::Device where) {
  return at::TensorOptions().dtype(tensor.scalar_type()).device(where);
}

// The same memory as a CPU tensor, for a kernel. It does not keep the memory: that is for whoever launches to see to.
inline Tensor on_cpu(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), like(tensor, at::kCPU));
  auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  TORCH_CHECK(tensor.storage().nbytes() >= needed, "simgpu: a kernel was given storage that was freed");
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), like(tensor, at::kCPU));
}

inline bool is_number(const Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_wrapped_number(); }

inline Tensor with_number(Tensor made, const Tensor& of) {
  if (is_number(of)) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// A CPU tensor as a kernel's argument counts with its value at launch.
inline Tensor argument(const Tensor& tensor) {
  if (!tensor.defined() || is_here(tensor)) return on_cpu(tensor);
  return with_number(tensor.clone(), tensor);
}

inline Tensor shape_of(const Tensor& tensor) {
  if (!tensor.defined() || (!is_here(tensor) && is_number(tensor))) return tensor;
  return with_number(at::empty_strided(tensor.sizes(), tensor.strides(), like(tensor, at::kMeta)), tensor);
}

inline Tensor fresh(const Tensor& shape) {
  return shape.defined() ? at::empty_strided(shape.sizes(), shape.strides(), like(shape, device())) : shape;
}

template <class F>
c10::IValue mapped(const c10::IValue& value, F function, c10::Device where) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& tensor : value.toTensorVector()) out.push_back(function(tensor));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (auto tensor : value.toOptionalTensorVector()) {
      bool is_there = tensor.has_value() && tensor->defined();
      out.push_back(is_there ? std::optional<Tensor>(function(*tensor)) : std::nullopt);
    }
    return out;
  }
  if (value.isDevice()) return where;
  if (value.isGenerator()) return c10::IValue();
  return value;
}

// Their shapes depend on values: a real device makes the host wait too.
inline const std::set<std::string> OF_VALUES = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal",
                                                "aten::bincount", "aten::repeat_interleave"};
// They take numbers from the one generator, in the order of their launches.
inline const std::set<std::string> OF_CHANCE = {"aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_",
                                                "aten::native_dropout", "aten::randperm", "aten::exponential_",
                                                "aten::multinomial"};

class Launch {
 public:
  Launch(const c10::OperatorHandle& op, Values arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)), stream_(current()) {}

  Values run() {
    bool needs_values = OF_VALUES.count(schema_.name()) > 0;
    bool is_late = !needs_values && !OF_CHANCE.count(schema_.name()) && find_shapes();
    auto on_host = std::make_shared<Values>();
    for (auto& one : arguments_) on_host->push_back(mapped(one, argument, at::kCPU));
    launched(schema_.name());
    return is_late ? late(on_host) : at_once(on_host, needs_values);
  }

 private:
  bool find_shapes() {
    Values before;
    for (auto& one : arguments_) shapes_.push_back(mapped(one, shape_of, at::kMeta));
    before = shapes_;
    try {
      op_.callBoxed(&shapes_);
    } catch (const c10::Error&) {
      counters().add(counters().synchronisations, "no meta kernel: " + schema_.name());
      return false;
    }
    // The CPU keeps these statistics in the dtype of the input.
    if (schema_.name() == "aten::native_layer_norm" || schema_.name() == "aten::native_group_norm")
      for (int index : {1, 2}) shapes_[index] = shapes_[index].toTensor().to(arguments_[0].toTensor().scalar_type());
    for (size_t index = 0; index < arguments_.size(); ++index) {  // out=, which may be resized
      auto alias = schema_.arguments()[index].alias_info();
      if (!alias || !alias->isWrite() || !arguments_[index].isTensor() || !is_here(arguments_[index].toTensor())) continue;
      auto wanted = before[index].toTensor().sizes();
      if (wanted != arguments_[index].toTensor().sizes()) arguments_[index].toTensor().resize_(wanted);
    }
    return true;
  }

  // The argument that is returned as result `index`, or none.
  const c10::IValue* returned(size_t index) const {
    auto alias = schema_.returns()[index].alias_info();
    if (!alias) return nullptr;
    for (size_t one = 0; one < arguments_.size(); ++one) {
      auto other = schema_.arguments()[one].alias_info();
      if (other && alias->isWrite() && other->isWrite() && other->beforeSets() == alias->beforeSets()) return &arguments_[one];
    }
    TORCH_CHECK(false, "simgpu: a view that has no kernel: ", schema_.name());
  }

  Values late(const std::shared_ptr<Values>& on_host) {
    Values out;
    auto targets = std::make_shared<std::vector<std::vector<Tensor>>>();
    for (size_t index = 0; index < schema_.returns().size(); ++index) {
      auto& into = targets->emplace_back();
      if (auto same = returned(index)) {
        out.push_back(*same);
        continue;
      }
      out.push_back(mapped(
          shapes_[index],
          [&](const Tensor& shape) {
            Tensor made = fresh(shape);
            into.push_back(on_cpu(made));
            return made;
          },
          device()));
    }
    stream_->launch([op = op_, on_host, targets] {
      at::AutoDispatchBelowADInplaceOrView below;
      at::NoGradGuard no_grad;
      op.callBoxed(on_host.get());
      for (size_t index = 0; index < targets->size(); ++index) fill((*targets)[index], (*on_host)[index]);
    });
    return out;
  }

  static void fill(std::vector<Tensor>& targets, const c10::IValue& value) {
    if (targets.empty()) return;
    auto values = value.isTensor() ? std::vector<Tensor>{value.toTensor()} : value.toTensorVector();
    for (size_t index = 0; index < targets.size(); ++index)
      if (targets[index].defined()) targets[index].copy_(values[index]);
  }

  Values at_once(const std::shared_ptr<Values>& on_host, bool is_counted) {
    if (is_counted) counters().add(counters().synchronisations, schema_.name());
    stream_->wait(stream_->last());
    raise_what_failed();
    {
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(on_host.get());
    }
    Values out;
    for (size_t index = 0; index < schema_.returns().size(); ++index) {
      if (auto same = returned(index)) {
        out.push_back(*same);
        continue;
      }
      out.push_back(mapped(
          (*on_host)[index],
          [&](const Tensor& value) {
            Tensor made = fresh(value);
            if (made.defined()) stream_->launch([to = on_cpu(made), value] { to.copy_(value); });
            return made;
          },
          device()));
    }
    return out;
  }

  c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  Values arguments_, shapes_;
  Stream* stream_;
};

inline void run_anything(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  Values out = Launch(op, Values(stack->end() - count, stack->end())).run();
  stack->erase(stack->end() - count, stack->end());
  for (auto& one : out) stack->push_back(std::move(one));
}

// ---------------------------------------------------------------- copies

inline Tensor copy_here(const Tensor& from, const Tensor& to) {
  launched("copy on the device");
  Tensor source = on_cpu(from.expand_as(to)), target = on_cpu(to);
  current()->launch([source, target] { target.copy_(source); });
  return to;
}

inline Tensor copy_from_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  // As CUDA: the host casts and lines up first, in pageable memory, which is read before the call returns.
  bool is_plain = from.scalar_type() == to.scalar_type() && from.is_contiguous() && to.is_contiguous() && from.numel() == to.numel();
  bool is_late = non_blocking && is_plain && PinnedAllocator::instance().holds(from.data_ptr());
  launched("copy from the host");
  if (!is_late && from.numel() > 1) counters().add(counters().pageable_copies, "from the host");
  Tensor source = is_late ? at::from_blob(from.data_ptr(), from.sizes(), from.strides(), like(from, at::kCPU)) : from.clone();
  Tensor target = on_cpu(to);
  current()->launch([source, target] { target.copy_(source); }, COPY_TICKS);
  if (!non_blocking) synchronise(current(), current()->last(), "copy from the host");
  return to;
}

inline Tensor copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool is_late = non_blocking && to.is_contiguous() && PinnedAllocator::instance().holds(to.data_ptr());
  launched("copy to the host");
  Tensor source = on_cpu(from.expand_as(to));
  Tensor target = is_late ? at::from_blob(to.data_ptr(), to.sizes(), to.strides(), like(to, at::kCPU)) : to;
  current()->launch([source, target] {
    at::NoGradGuard no_grad;
    target.copy_(source);
  }, COPY_TICKS);
  if (!is_late) {
    counters().add(counters().pageable_copies, "to the host");
    synchronise(current(), current()->last(), "copy to the host");
  }
  return to;
}

inline Tensor copy_any(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (is_here(from) && is_here(to)) return copy_here(from, to);
  return is_here(to) ? copy_from_host(from, to, non_blocking) : copy_to_host(from, to, non_blocking);
}

// Several tensors: one kernel where all are here; else, as CUDA has it, one copy each.
inline void copy_each(at::TensorList to, at::TensorList from, bool non_blocking) {
  bool all_here = true;
  for (size_t index = 0; index < to.size(); ++index) all_here = all_here && is_here(to[index]) && is_here(from[index]);
  if (!all_here) {
    for (size_t index = 0; index < to.size(); ++index) to[index].copy_(from[index], non_blocking);
    return;
  }
  launched("aten::_foreach_copy_");
  std::vector<std::pair<Tensor, Tensor>> both;
  for (size_t index = 0; index < to.size(); ++index) both.emplace_back(on_cpu(to[index]), on_cpu(from[index].expand_as(to[index])));
  current()->launch([both] {
    for (auto& [target, source] : both) target.copy_(source);
  });
}

}  // namespace simgpu
