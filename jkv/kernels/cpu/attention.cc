// Paged attention by a running softmax over blocks of keys, as in jkv/kernels/xla_attention.py.
#include "decode.h"
#include "prefill.h"

namespace jkv {
namespace {

namespace ffi = xla::ffi;

using Ints = ffi::Buffer<ffi::S32>;

// Rows of padding take no part in the step, but are to be finite.
template <typename T>
void run(ffi::ThreadPool pool, const Call<T>& c, const int32_t* counts, int64_t tokens) {
  int64_t used = counts[0];
  for (int64_t i = counts[0]; i < counts[1]; ++i) used = std::max<int64_t>(used, c.q_starts[i] + c.q_lens[i]);
  std::fill(c.out + used * c.heads * c.dim, c.out + tokens * c.heads * c.dim, 0.0f);
  decode(pool, c, counts[0]);
  prefill(pool, c, counts[0], counts[1]);
}

ffi::Error Attention(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q, ffi::AnyBuffer values, ffi::Buffer<ffi::F32> scales,
                     Ints layer, Ints window, Ints table, Ints kv_lens, Ints q_starts, Ints q_lens, Ints counts,
                     ffi::ResultBuffer<ffi::F32> out, int64_t pages, float scale, float soft_cap) {
  auto with = [&](auto* stored) {
    int64_t heads = q.dimensions()[1], dim = q.dimensions()[2], width = values.dimensions()[2];
    Call<std::remove_pointer_t<decltype(stored)>> c;
    c.values = stored;
    c.scales = scales.typed_data();
    c.q = q.typed_data();
    c.out = out->typed_data();
    c.table = table.typed_data();
    c.kv_lens = kv_lens.typed_data();
    c.q_starts = q_starts.typed_data();
    c.q_lens = q_lens.typed_data();
    c.first_row = *layer.typed_data() * pages;
    c.table_width = table.dimensions()[1];
    c.page_size = values.dimensions()[1];
    c.width = width;
    c.heads = heads;
    c.kv_heads = width / (2 * dim);
    c.group = heads / c.kv_heads;
    c.dim = dim;
    c.window = *window.typed_data();
    c.scale = scale;
    c.soft_cap = soft_cap;
    run(pool, c, counts.typed_data(), q.dimensions()[0]);
    return ffi::Error::Success();
  };
  switch (values.element_type()) {
    case ffi::F32: return with(values.typed_data<float>());
    case ffi::U16: return with(values.typed_data<uint16_t>());
    case ffi::S8: return with(values.typed_data<int8_t>());
    default: return ffi::Error::InvalidArgument("no kernel reads a KV pool of this type");
  }
}

}  // namespace
}  // namespace jkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(jkv_attention, jkv::Attention,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()
                                  .Ret<xla::ffi::Buffer<xla::ffi::F32>>()
                                  .Attr<int64_t>("pages")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap"));
