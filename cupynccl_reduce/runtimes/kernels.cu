// pack: flat arrays -> matrix (cast, sum, divide, pad). unpack: matrix -> flat arrays (cast, add).
//
// A matrix has rows x columns elements; each segment owns some columns of it. Element j of a
// segment's flat array is row j / width, column j % width of those columns; the rest is padding.
// A thread block works on one tile: a run of "groups" of one segment, counted along its rows. A
// group is V neighbouring columns, as many as give the wider of the two dtypes 16 bytes, and moves
// as one word where everything is aligned; else the same code runs with groups of one element.
//
//     one segment, width 11, columns 12, V 4       groups 0 1 2 | 3 4 5 | ...  row by row
//         row 0   [ 0  1  2  3][ 4  5  6  7][ 8  9 10  .]
//         row 1   [11 12 13 14][15 16 17 18][19 20  .  .]     . is padding: zero after pack
//
// No header is included, so that any NVRTC compiles this; 16-bit floats are their bits.

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;
using float32 = float;
using float64 = double;
struct float16 { uint16 bits; };
struct bfloat16 { uint16 bits; };

constexpr int THREADS = 256;
constexpr int AT_ONCE = 16;   // elements a thread loads before it stores any: hides the latency
constexpr int ENTRIES = 496;  // all arguments together must stay under 4 KiB

struct Segment {
    int64 numel, width, column, columns;
    int64 groups;      // per row
    int64 first_tile;  // of all tiles of the matrix
};

struct Arguments {
    const Segment* segments;
    const uint32* tile_segment;  // which segment each tile belongs to
    void* matrix;
    int64 rows, columns;
    float64 divisor;       // or its reciprocal, where that is exact
    uint32 first_tile;     // of this launch
    uint32 first_segment;  // of this launch: entries[0] is its
    uint32 tile_groups;
    uint32 tail;  // entries from here on are the lists that segments with several arrays point to
    uint32 mode;  // pack: DIVIDE, SCALE or neither, NAN_FILL; unpack: ACCUMULATE
    uint32 unused;
    // One per segment: 0 (no array), a pointer, or LIST | count << 32 | first (in the tail).
    // By value: the launch takes a snapshot, and a CUDA graph keeps it.
    uint64 entries[ENTRIES];
};
static_assert(sizeof(Arguments) <= 4096, "kernel arguments are limited to 4 KiB");

enum : uint32 { DIVIDE = 1, SCALE = 2, NAN_FILL = 4, ACCUMULATE = 8 };
constexpr uint64 LIST = 1ull << 63;

// ---- arithmetic -------------------------------------------------------------------------------
// CuPy compiles with -ftz=true, which makes subnormal floats zero. PTX instructions written out
// are out of that flag's reach (and of -fmad's and -prec-div's), so everything fp32 is one.

__device__ float32 plus(float32 a, float32 b) {
    float32 sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
__device__ float32 times(float32 a, float32 b) {
    float32 product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}
__device__ float32 over(float32 a, float32 b) {
    float32 quotient;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
    return quotient;
}
template <class T> __device__ T plus(T a, T b) { return static_cast<T>(a + b); }
template <class T> __device__ T times(T a, T b) { return static_cast<T>(a * b); }
template <class T> __device__ T over(T a, T b) { return static_cast<T>(a / b); }

template <class T> __device__ void convert(T x, T& y) { y = x; }
__device__ void convert(float16 x, float32& y) { asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); }
__device__ void convert(float16 x, float64& y) { asm("cvt.f64.f16 %0, %1;" : "=d"(y) : "h"(x.bits)); }
__device__ void convert(float32 x, float64& y) { asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x)); }
__device__ void convert(bfloat16 x, float32& y) { y = __uint_as_float(uint32(x.bits) << 16); }
__device__ void convert(bfloat16 x, float64& y) { convert(__uint_as_float(uint32(x.bits) << 16), y); }
__device__ void convert(float64 x, float32& y) { asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x)); }
__device__ void convert(float32 x, float16& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ void convert(float64 x, float16& y) { asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x)); }
__device__ void convert(float32 x, bfloat16& y) {
    const uint32 bits = __float_as_uint(x);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;  // rounding up could make it an infinity
    const uint32 rounded = bits + 0x7fff + ((bits >> 16) & 1);
    y.bits = static_cast<uint16>((nan ? bits | 0x400000 : rounded) >> 16);
}
__device__ void convert(float64 x, bfloat16& y) {
    // Through fp32 rounded to odd: rounded to nearest twice, a value just above a tie would be
    // taken for the tie.
    float32 chopped;
    float64 back;
    asm("cvt.rz.f32.f64 %0, %1;" : "=f"(chopped) : "d"(x));
    convert(chopped, back);
    convert(__uint_as_float(__float_as_uint(chopped) | (back != x)), y);
}

// What sums and divisions are made in: fp64 where one side is, else fp32; integers wrap around.
template <class S, class T> struct Sum { using type = float32; };
template <class S> struct Sum<S, float64> { using type = float64; };
template <class T> struct Sum<float64, T> { using type = float64; };
template <> struct Sum<float64, float64> { using type = float64; };
template <> struct Sum<uint8, uint8> { using type = uint8; };
template <> struct Sum<uint32, uint32> { using type = uint32; };
template <> struct Sum<uint64, uint64> { using type = uint64; };

template <class S, class T> constexpr bool same = false;
template <class T> constexpr bool same<T, T> = true;
template <class T> constexpr bool is_float = !same<typename Sum<T, T>::type, T> || same<T, float32> || same<T, float64>;

// ---- memory -----------------------------------------------------------------------------------

template <int BYTES> struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = uint32; };
template <> struct Word<2> { using type = uint16; };
template <> struct Word<1> { using type = uint8; };

template <class T, int V> union Lanes {
    typename Word<sizeof(T) * V>::type word;
    T x[V];

    __device__ void load(const T* p) { word = *reinterpret_cast<const decltype(word)*>(p); }
    __device__ void store(T* p) const { *reinterpret_cast<decltype(word)*>(p) = word; }
};

template <class S, class T> constexpr int widest = 16 / (sizeof(S) > sizeof(T) ? sizeof(S) : sizeof(T));
template <int V> constexpr int unroll = V < AT_ONCE ? AT_ONCE / V : 1;

template <class T, int V> __device__ bool aligned(const void* p) {
    return reinterpret_cast<uint64>(p) % (sizeof(T) * V) == 0;
}

// Whether every group of V in this segment starts on a word of the matrix, and of an aligned array.
template <class T, int V> __device__ bool rows_aligned(const Arguments& a, const Segment& segment) {
    return aligned<T, V>(static_cast<const T*>(a.matrix) + segment.column) &&
           (a.rows == 1 || (segment.width % V == 0 && a.columns % V == 0));
}

struct Place {
    int64 flat, cell;  // where the group starts, in the flat array and in the matrix
    int n, columns;    // how many of its elements the flat array has, and the matrix
};

// The groups of one thread: every THREADS-th of its block's tile. WIDEST is what tiles are counted
// in; the walk itself goes in groups of V.
template <int V, int WIDEST> struct Walk {
    const Segment& segment;
    int64 row_length, groups, row, group;
    uint32 at, end, row_step, group_step;

    __device__ Walk(const Arguments& a, const Segment& s, uint32 tile)
        : segment(s), row_length(a.columns), groups(s.groups * (WIDEST / V)) {
        const int64 first = (tile - s.first_tile) * a.tile_groups;
        const int64 left = a.rows * s.groups - first;
        at = threadIdx.x;
        end = (left < a.tile_groups ? static_cast<uint32>(left) : a.tile_groups) * (WIDEST / V);
        // The only divisions; from here on the position is stepped.
        row = (first * (WIDEST / V) + at) / groups;
        group = (first * (WIDEST / V) + at) % groups;
        const bool wide = groups > THREADS;
        row_step = wide ? 0 : THREADS / static_cast<uint32>(groups);
        group_step = wide ? THREADS : THREADS % static_cast<uint32>(groups);
    }

    __device__ Place next() {
        Place place = {0, 0, 0, 0};
        const int64 column = group * V;
        const int64 columns = segment.columns - column;
        if (at < end && columns > 0) {
            place.flat = row * segment.width + column;
            place.cell = row * row_length + segment.column + column;
            const int64 in_row = segment.width - column;
            const int64 in_array = segment.numel - place.flat;
            const int64 n = in_row < in_array ? in_row : in_array;
            place.n = n < 0 ? 0 : n < V ? static_cast<int>(n) : V;
            place.columns = columns < V ? static_cast<int>(columns) : V;
        }
        at += THREADS;
        row += row_step;
        group += group_step;
        if (group >= groups) {
            group -= groups;
            ++row;
        }
        return place;
    }
};

// ---- pack -------------------------------------------------------------------------------------

// The arrays of one segment: entries[first .. first + count).
struct Sources { uint32 first, count; };

template <class S> __device__ const S* source(const Arguments& a, Sources sources, uint32 k) {
    return reinterpret_cast<const S*>(a.entries[sources.first + k]);
}

template <class A, class T> __device__ T scaled(const Arguments& a, A sum) {
    if (a.mode & DIVIDE) sum = over(sum, static_cast<A>(a.divisor));
    if (a.mode & SCALE) sum = times(sum, static_cast<A>(a.divisor));
    T value;
    convert(sum, value);
    return value;
}

// One element, for the few groups that an array or a row ends in.
template <class S, class T> __device__ T pack_one(const Arguments& a, Sources sources, int64 flat) {
    using A = typename Sum<S, T>::type;
    const S first = source<S>(a, sources, 0)[flat];
    if constexpr (same<S, T>)
        if (sources.count == 1 && !a.mode) return first;
    A sum, term;
    convert(first, sum);
    for (uint32 k = 1; k < sources.count; ++k) {
        convert(source<S>(a, sources, k)[flat], term);
        sum = plus(sum, term);
    }
    return scaled<A, T>(a, sum);
}

template <class S, class T, int V>
__device__ void pack_tile(const Arguments& a, const Segment& segment, uint32 tile, Sources sources) {
    using A = typename Sum<S, T>::type;
    constexpr int U = unroll<V>;
    T* const matrix = static_cast<T*>(a.matrix);
    for (Walk<V, widest<S, T>> walk(a, segment, tile); walk.at < walk.end;) {
        Place place[U];
        Lanes<S, V> in[U];
        Lanes<T, V> out[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            place[u] = walk.next();
            in[u].word = {};
            if (place[u].n == V) in[u].load(source<S>(a, sources, 0) + place[u].flat);
        }
        bool raw = false;
        if constexpr (same<S, T>) {
            raw = sources.count == 1 && !a.mode;
            if (raw)  // the bits as they are: NaN payloads, -0.0
#pragma unroll
                for (int u = 0; u < U; ++u) out[u].word = in[u].word;
        }
        if (!raw) {
            A sum[U][V];
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int i = 0; i < V; ++i) convert(in[u].x[i], sum[u][i]);
            for (uint32 k = 1; k < sources.count; ++k) {
#pragma unroll
                for (int u = 0; u < U; ++u)
                    if (place[u].n == V) in[u].load(source<S>(a, sources, k) + place[u].flat);
#pragma unroll
                for (int u = 0; u < U; ++u)
#pragma unroll
                    for (int i = 0; i < V; ++i) {
                        A term;
                        convert(in[u].x[i], term);
                        sum[u][i] = plus(sum[u][i], term);
                    }
            }
#pragma unroll
            for (int u = 0; u < U; ++u)
#pragma unroll
                for (int i = 0; i < V; ++i) out[u].x[i] = scaled<A, T>(a, sum[u][i]);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            if (place[u].columns == V && (place[u].n == V || place[u].n == 0)) {
                out[u].store(matrix + place[u].cell);
            } else if constexpr (V > 1) {
#pragma unroll 1
                for (int i = 0; i < place[u].columns; ++i)
                    matrix[place[u].cell + i] = i < place[u].n ? pack_one<S, T>(a, sources, place[u].flat + i) : T{};
            }
        }
    }
}

// A segment without an array: zero, or NaN with zero padding.
template <class T, int V> __device__ void fill_tile(const Arguments& a, const Segment& segment, uint32 tile) {
    T value = {};
    if constexpr (is_float<T>)
        if (a.mode & NAN_FILL) convert(__uint_as_float(0x7fc00000), value);
    for (Walk<1, V> walk(a, segment, tile); walk.at < walk.end;) {
        const Place place = walk.next();
        if (place.columns) static_cast<T*>(a.matrix)[place.cell] = place.n ? value : T{};
    }
}

template <class S, class T>
__global__ void __launch_bounds__(THREADS) pack(const __grid_constant__ Arguments a) {
    constexpr int V = widest<S, T>;
    const uint32 tile = a.first_tile + blockIdx.x;
    const uint32 index = a.tile_segment[tile];
    const Segment segment = a.segments[index];
    const uint64 entry = a.entries[index - a.first_segment];
    if (!entry) return fill_tile<T, V>(a, segment, tile);
    Sources sources = {index - a.first_segment, 1};
    if (entry & LIST) sources = {a.tail + static_cast<uint32>(entry), static_cast<uint32>((entry ^ LIST) >> 32)};
    bool words = rows_aligned<T, V>(a, segment);
    for (uint32 k = 0; k < sources.count; ++k) words &= aligned<S, V>(source<S>(a, sources, k));
    words ? pack_tile<S, T, V>(a, segment, tile, sources) : pack_tile<S, T, 1>(a, segment, tile, sources);
}

// ---- unpack -----------------------------------------------------------------------------------

template <class S, class T> __device__ T unpack_one(const Arguments& a, S value, const T* target) {
    using A = typename Sum<S, T>::type;
    A sum, present;
    convert(value, sum);
    if (a.mode & ACCUMULATE) {
        convert(*target, present);
        sum = plus(present, sum);
    }
    T result;
    convert(sum, result);
    return result;
}

template <class S, class T, int V>
__device__ void unpack_tile(const Arguments& a, const Segment& segment, uint32 tile, T* target) {
    constexpr int U = unroll<V>;
    const S* const matrix = static_cast<const S*>(a.matrix);
    for (Walk<V, widest<S, T>> walk(a, segment, tile); walk.at < walk.end;) {
        Place place[U];
        Lanes<S, V> in[U];
        Lanes<T, V> out[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
            place[u] = walk.next();
            if (place[u].n < V) continue;
            in[u].load(matrix + place[u].cell);
            if (a.mode & ACCUMULATE) out[u].load(target + place[u].flat);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
            if (place[u].n == V) {
                bool raw = false;
                if constexpr (same<S, T>) {
                    raw = !(a.mode & ACCUMULATE);
                    if (raw) out[u].word = in[u].word;  // the bits as they are
                }
                if (!raw)
#pragma unroll
                    for (int i = 0; i < V; ++i) out[u].x[i] = unpack_one<S, T>(a, in[u].x[i], &out[u].x[i]);
                out[u].store(target + place[u].flat);
            } else if constexpr (V > 1) {
#pragma unroll 1
                for (int i = 0; i < place[u].n; ++i) {
                    T* const p = target + place[u].flat + i;
                    *p = unpack_one<S, T>(a, matrix[place[u].cell + i], p);
                }
            }
        }
    }
}

template <class S, class T>
__global__ void __launch_bounds__(THREADS) unpack(const __grid_constant__ Arguments a) {
    constexpr int V = widest<S, T>;
    const uint32 tile = a.first_tile + blockIdx.x;
    const uint32 index = a.tile_segment[tile];
    const Segment segment = a.segments[index];
    T* const target = reinterpret_cast<T*>(a.entries[index - a.first_segment]);
    if (!target) return;  // an array without elements
    const bool words = rows_aligned<S, V>(a, segment) && aligned<T, V>(target);
    words ? unpack_tile<S, T, V>(a, segment, tile, target) : unpack_tile<S, T, 1>(a, segment, tile, target);
}
