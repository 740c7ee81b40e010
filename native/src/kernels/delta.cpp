// Linear attention by the gated delta rule, and state-space layers; the layout of a state is in kernels.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels_of_set.h"
#include "quire/simd.h"

namespace quire::QUIRE_ISA {
namespace {

// The vectors of columns of S that are computed together: 128 rows of them fit into the first cache.
constexpr int kColumnVectors = 4;

StateEnd end_of(const float* record, const DeltaShape& shape) {
    StateEnd end;
    std::memcpy(&end, record + shape.record_floats() - kStateEnd, sizeof end);
    return end;
}

// Divides a head by its length, and by `divisor`.
void make_length_1(float* head, int count, float divisor) {
    Floats squares = broadcast(0.0F);
    for (int i = 0; i < count; i += kLanes) squares = fma(load(head + i), load(head + i), squares);
    const Floats length = broadcast(std::sqrt(sum(squares) + 1e-6F)), scale = broadcast(divisor);
    for (int i = 0; i < count; i += kLanes) store(head + i, load(head + i) / length / scale);
}

// Where a part of a token's inputs is in its row, in its filtered row, and in the stored inputs of a record.
struct Part {
    int in_row, in_filtered, in_record, count;
};

// The query, the key and the values of a record.
struct Parts {
    Parts(const DeltaShape& shape, int record) {
        const int key = shape.key_dim, values = shape.record_heads * shape.value_dim;
        const int shared = shape.key_head_of(record) * key, of_keys = shape.filtered_keys();
        part[0] = {shared, record * key, 0, key};
        part[1] = {shape.key_numbers() + shared, of_keys + record * key, key, key};
        part[2] = {2 * shape.key_numbers() + record * values, 2 * of_keys + record * values, 2 * key, values};
    }
    Part part[3];
};

// The inputs of an earlier token, before the filter, that the state has stored.
const float* stored_inputs(const DeltaTask& task, int record, std::int64_t position) {
    return task.record_before(record) + task.shape->inputs_at(position);
}

// Filters a part of a token's inputs.
void filter_part(const DeltaTask& task, int record, int token, const Part& part) {
    const DeltaShape& shape = *task.shape;
    const std::int64_t position = task.first_position + token;
    float* to = task.filtered.row(task.first_token + token) + part.in_filtered;
    for (int i = 0; i < part.count; i += kLanes) {
        Floats total = task.filter_bias == nullptr ? broadcast(0.0F) : load(task.filter_bias + part.in_row + i);
        for (int place = 0; place < shape.filter_width; ++place) {
            const std::int64_t back = shape.filter_width - 1 - place;
            if (back > position) continue;
            const float* from = back <= token
                                    ? task.inputs.row(task.first_token + token - static_cast<int>(back)) + part.in_row
                                    : stored_inputs(task, record, position - back) + part.in_record;
            const float* weight = task.filter + static_cast<std::size_t>(place) * shape.num_inputs() + part.in_row;
            total = fma(load(weight + i), load(from + i), total);
        }
        store(to + i, total);
    }
    activate(to, part.count, Activation::kSilu);
}

// Computes the filtered inputs of a token for one record, its decays and rates, and the product of query and key.
void prepare(const DeltaTask& task, int record, int token) {
    const DeltaShape& shape = *task.shape;
    for (const Part& part : Parts(shape, record).part) filter_part(task, record, token, part);
    const float* raw = task.inputs.row(task.first_token + token);
    float* row = task.filtered.row(task.first_token + token);
    float *query = row + record * shape.key_dim, *key = query + shape.filtered_keys();
    if (!shape.mamba) {
        make_length_1(query, shape.key_dim, std::sqrt(static_cast<float>(shape.key_dim)));
        make_length_1(key, shape.key_dim, 1.0F);
    }
    Floats overlap = broadcast(0.0F);
    for (int i = 0; i < shape.key_dim; i += kLanes) overlap = fma(load(query + i), load(key + i), overlap);
    float* rest = row + shape.filtered_inputs();
    rest[2 * shape.num_heads + record] = sum(overlap);
    for (int i = 0; i < shape.record_heads; ++i) {
        const int head = record * shape.record_heads + i;
        const double moved = static_cast<double>(raw[shape.first_of_decays() + head]) + task.decay_offsets[head];
        const double softplus = (moved > 0.0 ? moved : 0.0) + std::log1p(std::exp(moved > 0.0 ? -moved : moved));
        rest[head] = static_cast<float>(std::exp(-task.decay_speeds[head] * softplus));
        const double rate =
            shape.mamba ? softplus : shape.rate_scale / (1.0 + std::exp(-double{raw[shape.first_of_rates() + head]}));
        rest[shape.num_heads + head] = static_cast<float>(rate);
    }
}

// What a token changes in S, besides a vector for each value head.
struct Change {
    const float* key = nullptr;
    float decay = 0.0F;
    bool any = false;
};

// Some columns of the matrix S of one value head, with the change of the last token to them. A record has these columns
// row by row, then the next ones. States that are stored after the first late token lack it and the later ones.
template <int kVectors, bool kMamba>
class Columns {
  public:
    Columns(const DeltaTask& task, int record, int head, int column, float* scratch)
        : task_(task), shape_(*task.shape), record_(record), head_(head), column_(column), scratch_(scratch) {}

    void run() {
        begin();
        for (int token = 0; token < task_.num_tokens; ++token) {
            const bool is_late = token >= task_.first_late();
            int stored = token;  // the first state that has this token
            while (is_late && !task_.is_stored_after(stored)) ++stored;
            const bool has_record = token <= task_.first_late() && task_.is_stored_after(stored);
            add(token, has_record ? matrix_in(stored) : scratch_);
            if (!is_late && has_record) store_change(token, token);
            for (; is_late && stored < task_.num_tokens; ++stored) {
                if (!task_.is_stored_after(stored)) continue;
                store_change(token, stored);
                if (token == task_.first_late() && matrix_in(stored) != matrix_) copy_matrix(matrix_in(stored));
            }
        }
    }

  private:
    static constexpr int kCount = kVectors * kLanes;

    std::size_t first_of_matrix() const {
        return (static_cast<std::size_t>(head_) * shape_.value_dim + column_) * shape_.key_dim;
    }
    // Where these columns are in the state that is stored after a token.
    float* matrix_in(int stored) const { return task_.record_of(record_, stored) + first_of_matrix(); }
    std::size_t vector_at(std::int64_t position) const {
        return shape_.change_at(position) + shape_.key_dim + static_cast<std::size_t>(head_) * shape_.value_dim +
               column_;
    }
    // Stores the change by a token in the state after another.
    void store_change(int token, int stored) const {
        float* to = task_.record_of(record_, stored) + vector_at(task_.first_position + token);
        QUIRE_UNROLLED
        for (int v = 0; v < kVectors; ++v) store(to + v * kLanes, change_[v]);
    }
    void copy_matrix(float* to) const {
        std::memcpy(to, matrix_, static_cast<std::size_t>(shape_.key_dim) * kCount * sizeof(float));
    }

    // Reads S and the changes that it lacks, and applies all but the last one.
    void begin() {
        if (task_.first_position == 0) {
            std::memset(scratch_, 0, static_cast<std::size_t>(shape_.key_dim) * kCount * sizeof(float));
            matrix_ = scratch_;
            return;
        }
        const float* record = task_.record_before(record_);
        const StateEnd end = end_of(record, shape_);
        matrix_ = record + first_of_matrix();
        for (std::int64_t late = end.position - end.num_late + 1; late < task_.first_position; ++late) {
            if (last_.any) {
                apply(scratch_);
                matrix_ = scratch_;
            }
            const float* change = record + shape_.change_at(late);
            last_ = {change, change[shape_.key_dim + shape_.record_heads * shape_.value_dim + head_], true};
            QUIRE_UNROLLED
            for (int v = 0; v < kVectors; ++v) change_[v] = load(record + vector_at(late) + v * kLanes);
        }
    }

    // Writes S with the last change applied.
    void apply(float* to) const {
        const Floats decay = broadcast(last_.decay);
        for (int row = 0; row < shape_.key_dim; ++row) {
            const Floats key = broadcast(last_.key[row]);
            QUIRE_UNROLLED
            for (int v = 0; v < kVectors; ++v) {
                const int at = row * kCount + v * kLanes;
                store(to + at, fma(key, change_[v], decay * load(matrix_ + at)));
            }
        }
    }

    // Writes S with the change of the token before applied, and notes what this token changes; writes its output.
    void add(int token, float* to) {
        const float* row = task_.filtered.row(task_.first_token + token);
        const float* query = row + record_ * shape_.key_dim;
        const float* key = query + shape_.filtered_keys();
        const int value_head = record_ * shape_.record_heads + head_;
        const int column = value_head * shape_.value_dim + column_;
        const float* value = row + 2 * shape_.filtered_keys() + column;
        const float* rest = row + shape_.filtered_inputs();
        const float decay = rest[value_head], rate = rest[shape_.num_heads + value_head];
        const float overlap = rest[2 * shape_.num_heads + record_];
        const float skip = kMamba ? task_.skip[value_head] : 0.0F;
        Floats known[kVectors], read[kVectors];
        QUIRE_UNROLLED
        for (int v = 0; v < kVectors; ++v) known[v] = read[v] = broadcast(0.0F);
        if (last_.any) {
            pass<true>(query, key, to, known, read);
        } else {
            pass<false>(query, key, to, known, read);
        }
        float* output = task_.output.row(task_.first_token + token) + column;
        QUIRE_UNROLLED
        for (int v = 0; v < kVectors; ++v) {
            const Floats own = load(value + v * kLanes);
            change_[v] = (kMamba ? own : own - broadcast(decay) * known[v]) * broadcast(rate);
            const Floats result = fma(broadcast(overlap), change_[v], broadcast(decay) * read[v]);
            store(output + v * kLanes, kMamba ? fma(broadcast(skip), own, result) : result);
        }
        last_ = {key, decay, true};
        matrix_ = to;
    }

    template <bool kApply>
    void pass(const float* query, const float* key, float* to, Floats (&known)[kVectors],
              Floats (&read)[kVectors]) const {
        const Floats decay = broadcast(last_.decay);
        for (int row = 0; row < shape_.key_dim; ++row) {
            const float* from = matrix_ + row * kCount;
            const Floats by_key = broadcast(key[row]), by_query = broadcast(query[row]);
            const Floats last_key = kApply ? broadcast(last_.key[row]) : by_key;
            QUIRE_UNROLLED
            for (int v = 0; v < kVectors; ++v) {
                Floats numbers = load(from + v * kLanes);
                if (kApply) numbers = fma(last_key, change_[v], decay * numbers);
                store(to + row * kCount + v * kLanes, numbers);
                if (!kMamba) known[v] = fma(by_key, numbers, known[v]);
                read[v] = fma(by_query, numbers, read[v]);
            }
        }
    }

    const DeltaTask& task_;
    const DeltaShape& shape_;
    const int record_, head_, column_;
    float* const scratch_;
    const float* matrix_ = nullptr;  // [key_dim, kCount]: in a record, or in the scratch
    Floats change_[kVectors];
    Change last_;
};

// Stores what all columns of a record share, after a token: the inputs, the keys and decays of changes, and the end.
void put_rest(const DeltaTask& task, int index, int token) {
    const DeltaShape& shape = *task.shape;
    const std::int64_t position = task.first_position + token;
    float* record = task.record_of(index, token);
    for (std::int64_t back = 0; back < shape.num_inputs_kept() && back <= position; ++back) {
        float* to = record + shape.inputs_at(position - back);
        if (back > token) {
            const float* from = stored_inputs(task, index, position - back);
            if (from != to) std::memcpy(to, from, shape.record_inputs() * sizeof(float));
            continue;
        }
        const float* row = task.inputs.row(task.first_token + token - static_cast<int>(back));
        for (const Part& part : Parts(shape, index).part) {
            std::memcpy(to + part.in_record, row + part.in_row, part.count * sizeof(float));
        }
    }
    const int first_late = std::min(token, task.first_late());
    const StateEnd end = {token - first_late + 1, static_cast<std::int32_t>(position)};
    for (int late = first_late; late <= token; ++late) {
        const float* row = task.filtered.row(task.first_token + late);
        float* change = record + shape.change_at(task.first_position + late);
        float* decays = change + shape.key_dim + shape.record_heads * shape.value_dim;
        std::memcpy(change, row + shape.filtered_keys() + index * shape.key_dim, shape.key_dim * sizeof(float));
        std::memcpy(decays, row + shape.filtered_inputs() + index * shape.record_heads,
                    shape.record_heads * sizeof(float));
        std::fill(decays + shape.record_heads, change + shape.record_change(), 0.0F);
    }
    // A block may be stored on disk: nothing of the requests that had it before may be left in it.
    for (std::int64_t unused = position + 1; unused < shape.num_inputs_kept(); ++unused) {
        std::fill_n(record + shape.inputs_at(unused), shape.record_inputs(), 0.0F);
    }
    const bool is_new = task.first_position == 0 || record != task.record_before(index);
    for (int unused = 1; is_new && unused <= shape.num_late - end.num_late; ++unused) {
        std::fill_n(record + shape.change_at(position + unused), shape.record_change(), 0.0F);
    }
    float* last = record + shape.record_floats();
    std::fill(last - kPanelWidth, last, 0.0F);
    std::memcpy(last - kStateEnd, &end, sizeof end);
}

// Adds the tokens to some columns of S of each value head of a record.
template <int kVectors>
void add_to_columns(const DeltaTask& task, int record, int first_column, int end_column, float* scratch) {
    for (int head = 0; head < task.shape->record_heads; ++head) {
        for (int column = first_column; column < end_column; column += kVectors * kLanes) {
            if (task.shape->mamba) {
                Columns<kVectors, true>(task, record, head, column, scratch).run();
            } else {
                Columns<kVectors, false>(task, record, head, column, scratch).run();
            }
        }
    }
}

}  // namespace

void delta(const DeltaTask& task, int record, float* scratch) {
    const DeltaShape& shape = *task.shape;
    if (task.first_position > 0 && !end_of(task.record_before(record), shape).allows(task.first_position)) {
        const int first = record * shape.record_heads * shape.value_dim;
        for (int token = 0; token < task.num_tokens; ++token) {
            std::fill_n(task.output.row(task.first_token + token) + first, shape.record_heads * shape.value_dim,
                        std::numeric_limits<float>::quiet_NaN());
        }
        return;
    }
    for (int token = 0; token < task.num_tokens; ++token) prepare(task, record, token);
    const int wide = shape.value_dim / (kColumnVectors * kLanes) * (kColumnVectors * kLanes);
    add_to_columns<kColumnVectors>(task, record, 0, wide, scratch);
    const int pairs = shape.value_dim / (2 * kLanes) * (2 * kLanes);
    add_to_columns<2>(task, record, wide, pairs, scratch);
    add_to_columns<1>(task, record, pairs, shape.value_dim, scratch);
    for (int token = 0; token < task.num_tokens; ++token) {
        if (task.is_stored_after(token)) put_rest(task, record, token);
    }
}

}  // namespace quire::QUIRE_ISA
