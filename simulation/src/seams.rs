//! Where the machine shows through, taken over: its clocks and its source of randomness.
//!
//! The library takes time and randomness from what it is given. What lies below it does not: the SDK reads `Instant` for its
//! deadlines, every `HashMap` draws its keys, and tokio's `select!` draws a branch. All of that comes from two functions of
//! the C library, so this module defines them: the linker prefers a definition of the program's own. On a thread that plays
//! a world they answer from the world's clock and from its seed; on any other they ask the kernel as ever.
//!
//! On systems other than Linux nothing is taken over: worlds can be played there, but not twice the same.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// What the clocks of the world show at its beginning, in seconds: 1 January 2026.
const BEGINNING: u64 = 1_767_225_600;

thread_local! {
    static PLAYING: Cell<bool> = const { Cell::new(false) };
    /// Since the beginning of the world.
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// By how many milliseconds the clock of whoever is running is off.
    static SKEW: Cell<i64> = const { Cell::new(0) };
    static RANDOM: Cell<u64> = const { Cell::new(0) };
}

/// From here on this thread has the time and the randomness of the world `seed`.
pub fn enter(seed: u64) {
    RANDOM.set(seed ^ 0x5EED_5EED_5EED_5EED);
    NOW.set(Duration::ZERO);
    SKEW.set(0);
    PLAYING.set(true);
}

/// Sets the world's time.
pub fn set_now(since_beginning: Duration) {
    NOW.set(since_beginning);
    STEPS.fetch_add(1, Ordering::Relaxed);
}

/// How often the time of any world has been set: what stays the same for long, seen from another thread, is a world in which
/// something spins. Its time can't go on while anything in it could.
pub fn steps() -> u64 {
    STEPS.load(Ordering::Relaxed)
}

static STEPS: AtomicU64 = AtomicU64::new(0);

/// The world's time, since its beginning. On a thread that plays none, the time since somebody first asked.
pub fn now() -> Duration {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    if PLAYING.get() {
        return NOW.get();
    }
    FIRST.get_or_init(Instant::now).elapsed()
}

/// Sets by how much the wall clock of what runs now is off.
pub fn set_skew(millis: i64) {
    SKEW.set(millis);
}

/// The world's wall clock in milliseconds, which no host is off from.
pub fn wall_millis() -> u64 {
    BEGINNING * 1_000 + u64::try_from(NOW.get().as_millis()).unwrap_or(u64::MAX)
}

/// The wall clock of the host that runs now, in milliseconds.
pub fn host_millis() -> u64 {
    wall_millis().saturating_add_signed(SKEW.get())
}

/// What the host that runs now calls `millis`, in the world's time.
pub fn since_beginning_by_host(millis: u64) -> Duration {
    Duration::from_millis(millis.saturating_add_signed(-SKEW.get()).saturating_sub(BEGINNING * 1_000))
}

#[cfg(target_os = "linux")]
fn next_random() -> u64 {
    // splitmix64
    let state = RANDOM.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
    RANDOM.set(state);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
mod taken_over {
    use super::{host_millis, next_random, BEGINNING, NOW, PLAYING};
    use libc::{c_int, c_long, c_uint, c_void, clockid_t, size_t, ssize_t, timespec};

    /// The clock that `SystemTime` and `Instant` read.
    ///
    /// # Safety
    ///
    /// As `clock_gettime(2)`: `time` points to a `timespec` that can be written, or is null.
    #[no_mangle]
    pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
        if !PLAYING.get() || time.is_null() {
            return unsafe { libc::syscall(libc::SYS_clock_gettime, c_long::from(clock), time) } as c_int;
        }
        let (seconds, nanos) = if clock == libc::CLOCK_REALTIME || clock == libc::CLOCK_REALTIME_COARSE {
            let millis = host_millis();
            (millis / 1_000, millis % 1_000 * 1_000_000)
        } else {
            // Long since the machine started, so that "an hour ago" can be said.
            let now = NOW.get();
            (BEGINNING / 1_000 + now.as_secs(), u64::from(now.subsec_nanos()))
        };
        unsafe { *time = timespec { tv_sec: seconds as libc::time_t, tv_nsec: nanos as c_long } };
        0
    }

    /// The source that the standard library and every generator are seeded from.
    ///
    /// # Safety
    ///
    /// As `getrandom(2)`: `buffer` points to `length` bytes that can be written.
    #[no_mangle]
    pub unsafe extern "C" fn getrandom(buffer: *mut c_void, length: size_t, flags: c_uint) -> ssize_t {
        if !PLAYING.get() {
            return unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, c_long::from(flags)) } as ssize_t;
        }
        for at in 0..length {
            unsafe { *buffer.cast::<u8>().add(at) = next_random().to_le_bytes()[0] };
        }
        length as ssize_t
    }
}
