// The norm of all shards, and their scaling: measure -> fold -> (all_gather) -> finish -> scale.
//
// Sums of |x|^P are made in fp64 and always in one order (no atomics), so that every run gives the
// same bits. P is 1 or 2, or ANY: then the order is `p`. 0 stands for infinity, where the largest |x|
// takes the place of the sum.
// A thread block measures one tile: part of one array. One block folds what the tiles gave, and
// one what the ranks gave.
//
// Compiled behind arithmetic.cu and kernels.cu, as one source.

constexpr int FOLDERS = 1024;  // threads of a block that folds
constexpr int ANY = 3;         // order of a norm that has no code of its own
constexpr int WORDS = 4;       // that a thread loads before it uses any
constexpr float64 EPSILON = 1e-6;

struct NormTile {
    uint64 address;
    int64 numel;
};

struct NormArguments {
    const NormTile* tiles;
    const float64* in;
    float64* out;
    const void* loss_scale_at;  // null: `loss_scale` counts
    int64 count;                // of `in`
    float64 p;                  // for ANY
    float64 start;              // what a fold begins with
    float64 max_norm;           // negative: no clipping
    float64 loss_scale;
    uint32 mode;  // the flag below
    uint32 unused;
};

enum : uint32 { DOUBLE_SCALE = 1 };  // what loss_scale_at points to; else a float

// ---- measure, fold and finish -----------------------------------------------------------------

template <int P> __device__ float64 join(float64 total, float64 term) {
    if constexpr (P > 0) return total + term;
    return term > total || term != term ? term : total;  // a NaN stays
}

template <class T, int P> __device__ float64 power(T x, const NormArguments& a) {
    float64 wide;
    convert(x, wide);
    if constexpr (P == 2) return wide * wide;
    if constexpr (P == ANY) return pow(fabs(wide), a.p);
    return fabs(wide);
}

template <int P> __device__ float64 root(float64 total, const NormArguments& a) {
    if constexpr (P == 2) return sqrt(total);
    if constexpr (P == ANY) return pow(total, 1 / a.p);
    return total;
}

// Join one value of each of N threads; the result is thread 0's.
template <int P, int N> __device__ float64 join_block(float64 value) {
    __shared__ float64 values[N];
    values[threadIdx.x] = value;
    ROLLED for (int half = N / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) {
            const float64 other = values[threadIdx.x + half];
            values[threadIdx.x] = join<P>(values[threadIdx.x], other);
        }
    }
    return values[0];
}

// Join `in[0 .. count)`, for thread 0.
template <int P> __device__ float64 join_all(const NormArguments& a) {
    float64 total = threadIdx.x == 0 ? a.start : 0;
    for (int64 i = threadIdx.x; i < a.count; i += FOLDERS) total = join<P>(total, a.in[i]);
    return join_block<P, FOLDERS>(total);
}

template <class T, int P>
__global__ void __launch_bounds__(THREADS) measure(const __grid_constant__ NormArguments a) {
    constexpr int V = 16 / sizeof(T);
    constexpr int STRIDE = THREADS * V;
    const NormTile tile = a.tiles[blockIdx.x];
    const T* const in = reinterpret_cast<const T*>(tile.address);
    const int numel = static_cast<int>(tile.numel);
    const int whole = aligned<T, V>(in) ? numel / V * V : 0;
    float64 total = 0;
    ROLLED for (int begin = threadIdx.x * V; begin < whole; begin += WORDS * STRIDE) {
        Lanes<T, V> words[WORDS];
        EACH(u, WORDS) if (begin + u * STRIDE < whole) words[u].load(in + begin + u * STRIDE);
        EACH(u, WORDS) {
            if (begin + u * STRIDE >= whole) continue;
            EACH(i, V) total = join<P>(total, power<T, P>(words[u].x[i], a));
        }
    }
    ROLLED for (int i = whole + threadIdx.x; i < numel; i += THREADS)
        total = join<P>(total, power<T, P>(in[i], a));
    total = join_block<P, THREADS>(total);
    if (threadIdx.x == 0) a.out[blockIdx.x] = total;
}

template <int P>
__global__ void __launch_bounds__(FOLDERS) fold(const __grid_constant__ NormArguments a) {
    const float64 total = join_all<P>(a);
    if (threadIdx.x == 0) a.out[0] = total;
}

template <int P>
__global__ void __launch_bounds__(FOLDERS) finish(const __grid_constant__ NormArguments a) {
    const float64 total = join_all<P>(a);
    if (threadIdx.x != 0) return;
    float64 loss_scale = a.loss_scale;
    if (a.loss_scale_at != nullptr) {
        if (a.mode & DOUBLE_SCALE) loss_scale = *static_cast<const float64*>(a.loss_scale_at);
        else convert(*static_cast<const float32*>(a.loss_scale_at), loss_scale);
    }
    const float64 norm = root<P>(total, a) / loss_scale;
    float64 factor = 1;
    if (a.max_norm >= 0) {
        const float64 clipped = a.max_norm / (norm + EPSILON);
        factor = clipped < 1 || clipped != clipped ? clipped : 1;  // a NaN stays
    }
    a.out[0] = norm;
    a.out[1] = factor / loss_scale;
}

// ---- scale ------------------------------------------------------------------------------------

template <class T> __device__ void scale_one(T& x, float64 factor) {
    float64 wide;
    convert(x, wide);
    convert(wide * factor, x);
}

template <class T>
__global__ void __launch_bounds__(THREADS) scale(const __grid_constant__ NormArguments a) {
    constexpr int V = 16 / sizeof(T);
    constexpr int STRIDE = THREADS * V;
    const float64 factor = a.in[0];
    if (factor == 1) return;
    const NormTile tile = a.tiles[blockIdx.x];
    T* const array = reinterpret_cast<T*>(tile.address);
    const int numel = static_cast<int>(tile.numel);
    const int whole = aligned<T, V>(array) ? numel / V * V : 0;
    ROLLED for (int begin = threadIdx.x * V; begin < whole; begin += WORDS * STRIDE) {
        Lanes<T, V> words[WORDS];
        EACH(u, WORDS) if (begin + u * STRIDE < whole) words[u].load(array + begin + u * STRIDE);
        EACH(u, WORDS) {
            if (begin + u * STRIDE >= whole) continue;
            EACH(i, V) scale_one(words[u].x[i], factor);
            words[u].store(array + begin + u * STRIDE);
        }
    }
    ROLLED for (int i = whole + threadIdx.x; i < numel; i += THREADS) scale_one(array[i], factor);
}
