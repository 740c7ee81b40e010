// quire._benchmarks: times single parts of a step; see benchmarks.h. A separate module, so that an engine does not
// load it. Its functions take the kernels and the thread team of quire._native: both modules are in one nanobind
// domain.
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "../bindings/bindings.h"
#include "benchmarks.h"
#include "quire/decoder.h"
#include "quire/memory_preparer.h"

namespace quire::bindings {
namespace {

using Bytes = Array<const std::uint8_t, 1>;
using Words = nb::ndarray<const std::uint16_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<nb::ro, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Column = Array<const std::int64_t, 1>;
using Table = Array<const std::int64_t, 2>;

std::vector<double> read_seconds(ThreadTeam& team, const Bytes& data, int num_passes) {
    nb::gil_scoped_release release;
    return time_reading(team, reinterpret_cast<const std::byte*>(data.data()), data.shape(0), num_passes);
}

double rate(const Kernels& kernels, ThreadTeam& team, double seconds) {
    nb::gil_scoped_release release;
    return arithmetic_rate(kernels.name, team, seconds);
}

// Packed copies of one matrix, so that together they can exceed the caches.
class ProductBenchmark {
  public:
    ProductBenchmark(const Kernels& kernels, ThreadTeam& team, const Words& rows, int num_copies,
                     const std::string& codes)
        : kernels_(kernels), team_(team), matrices_(num_copies) {
        if (num_copies < 1) throw std::invalid_argument("at least one copy of the matrix is wanted");
        const MatrixRows from = {.data = rows.data(),
                                 .type = StoredType::kBfloat16,
                                 .num_outputs = static_cast<int>(rows.shape(0)),
                                 .num_inputs = static_cast<int>(rows.shape(1))};
        const std::optional<StoredType> as = codes.empty() ? from.type : block_type_named(codes);
        if (!as) throw std::invalid_argument("no codes are called " + codes);
        for (PackedMatrix& matrix : matrices_) {
            matrix.pack(kernels, &team, memory_, from, *as, PackedMatrix::Form::kSmallest);
        }
        // As an engine's weights are after its first idle seconds.
        MemoryPreparer preparer;
        preparer.start(memory_.ranges());
        while (preparer.num_left() > 0) std::this_thread::sleep_for(std::chrono::milliseconds{1});
    }

    ProductBenchmark(const ProductBenchmark&) = delete;
    ProductBenchmark& operator=(const ProductBenchmark&) = delete;

    std::size_t num_bytes() const { return matrices_.front().num_bytes(); }

    std::vector<double> run(int num_rows, int num_calls) const {
        if (num_rows < 1) throw std::invalid_argument("at least one row is wanted");
        std::vector<MatrixView> views;
        for (const PackedMatrix& matrix : matrices_) views.push_back(matrix.view());
        const int from = round_up(views.front().num_inputs, kPanelWidth);
        const int to = round_up(views.front().num_outputs, kPanelWidth);
        Buffer<float> input(static_cast<std::size_t>(num_rows) * from), output(static_cast<std::size_t>(num_rows) * to);
        std::fill_n(input.data(), input.size(), 0.5F);
        std::fill_n(output.data(), output.size(), 0.0F);
        nb::gil_scoped_release release;
        return time_products(kernels_, team_, views, {input.data(), from}, {output.data(), to}, num_rows, num_calls);
    }

  private:
    const Kernels& kernels_;
    ThreadTeam& team_;
    Arena memory_;
    std::vector<PackedMatrix> matrices_;
};

PagedKv layer_of(const Blocks& keys, const Blocks& values, const std::string& dtype, int head_dim) {
    // The kernels of attention only read; decoding does not write either.
    PagedKv kv = {.keys = const_cast<void*>(keys.data()),
                  .values = const_cast<void*>(values.data()),
                  .type = kv_type_of(dtype),
                  .num_kv_heads = static_cast<int>(keys.shape(2)),
                  .block_size = static_cast<int>(keys.shape(1)),
                  .head_dim = head_dim};
    if (!fits(kv, keys, values)) {
        throw std::invalid_argument("the KV memory does not have the shape that is said");
    }
    return kv;
}

std::vector<double> attention_seconds(const Kernels& kernels, ThreadTeam& team,
                                      const std::vector<std::tuple<Blocks, Blocks>>& layers, const std::string& dtype,
                                      const Table& tables, const Column& lengths, int num_queries, int num_heads,
                                      int head_dim, int num_passes) {
    if (layers.empty()) throw std::invalid_argument("at least one layer is wanted");
    std::vector<PagedKv> views;
    std::size_t num_blocks = 0;
    for (const auto& [keys, values] : layers) {
        views.push_back(layer_of(keys, values, dtype, head_dim));
        num_blocks = views.size() == 1 ? keys.shape(0) : std::min(num_blocks, keys.shape(0));
    }
    const auto is_block = [&](std::int64_t block) {
        return block >= 0 && block < static_cast<std::int64_t>(num_blocks);
    };
    const std::int64_t most = static_cast<std::int64_t>(tables.shape(1)) * views.front().block_size;
    const auto is_length = [&](std::int64_t length) { return length >= num_queries && length <= most; };
    if (num_queries < 1 || lengths.shape(0) != tables.shape(0) || num_heads % views.front().num_kv_heads != 0 ||
        !std::all_of(tables.data(), tables.data() + tables.size(), is_block) ||
        !std::all_of(lengths.data(), lengths.data() + lengths.size(), is_length)) {
        throw std::invalid_argument("the sequences do not fit into the KV memory");
    }
    const AttendingSequences sequences = {.block_tables = tables.data(),
                                          .table_stride = static_cast<std::int64_t>(tables.shape(1)),
                                          .lengths = lengths.data(),
                                          .num_sequences = static_cast<int>(tables.shape(0)),
                                          .num_queries = num_queries,
                                          .num_heads = num_heads};
    nb::gil_scoped_release release;
    return time_attention(kernels, team, views, sequences, num_passes);
}

}  // namespace

}  // namespace quire::bindings

NB_MODULE(_benchmarks, module) {
    using namespace quire::bindings;
    module.doc() = "Parts of a step, timed by themselves.";
    nb::module_::import_("quire._native");  // whose types are in the signatures below
    module.def("read_seconds", &read_seconds, nb::arg("team"), nb::arg("data"), nb::arg("num_passes"),
               "Seconds of each pass in which the team reads the bytes once.");
    module.def("arithmetic_rate", &rate, nb::arg("kernels"), nb::arg("team"), nb::arg("seconds"),
               "Additions and multiplications per second on registers, as the kernels do them; 0: not known.");
    nb::class_<ProductBenchmark>(module, "ProductBenchmark", "Copies of a packed matrix, and products with them.")
        .def(nb::init<const quire::Kernels&, quire::ThreadTeam&, const Words&, int, const std::string&>(),
             nb::arg("kernels"), nb::arg("team"), nb::arg("rows"), nb::arg("num_copies"), nb::kw_only(),
             nb::arg("codes") = "", nb::keep_alive<1, 3>())
        .def_prop_ro("num_bytes", &ProductBenchmark::num_bytes, "Bytes of one copy.")
        .def("run", &ProductBenchmark::run, nb::arg("num_rows"), nb::arg("num_calls"),
             "Seconds of each product; every call takes the next copy.");
    module.def("attention_seconds", &attention_seconds, nb::arg("kernels"), nb::arg("team"), nb::arg("layers"),
               nb::arg("dtype"), nb::arg("tables"), nb::arg("lengths"), nb::arg("num_queries"), nb::arg("num_heads"),
               nb::arg("head_dim"), nb::arg("num_passes"),
               "Seconds of each pass of the newest tokens of all sequences over all layers, each given by its keys and "
               "values.");
}
