//! Virtual time and seeded randomness below the library: replacements of two functions of the C library.
//!
//! The library takes time and randomness from its configuration. The layers below it do not:
//! - the SDK reads `Instant` for its deadlines,
//! - every `HashMap` draws its keys,
//! - the `select!` of tokio draws a branch.
//!
//! All of them call `clock_gettime` or `getrandom`. This module defines both functions, because the linker prefers a
//! definition of the program to that of the C library. On the thread of a run they answer from its clock and its seed.
//! On any other thread they ask the kernel.
//!
//! On systems other than Linux this module replaces nothing. Runs work there, but a seed does not repeat its run.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The Unix time in seconds at which every run begins: 1 January 2026.
const BEGINNING: u64 = 1_767_225_600;

thread_local! {
    /// Whether this thread belongs to a run.
    static IN_RUN: Cell<bool> = const { Cell::new(false) };
    /// The time since the run began.
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    /// The clock error of the host that runs now, in milliseconds.
    static SKEW: Cell<i64> = const { Cell::new(0) };
    static RANDOM: Cell<u64> = const { Cell::new(0) };
}

/// Gives this thread the time and the randomness of the run with this seed.
pub fn enter(seed: u64) {
    RANDOM.set(seed ^ 0x5EED_5EED_5EED_5EED);
    NOW.set(Duration::ZERO);
    SKEW.set(0);
    IN_RUN.set(true);
}

/// Sets the time of the run.
pub fn set_now(since_beginning: Duration) {
    NOW.set(since_beginning);
    STEPS.fetch_add(1, Ordering::Relaxed);
}

/// How often any run of this process has set its time. If another thread sees the same number for long, a task of the
/// run spins: virtual time stands still while a task is ready.
pub fn steps() -> u64 {
    STEPS.load(Ordering::Relaxed)
}

static STEPS: AtomicU64 = AtomicU64::new(0);

/// The time since the run began. On a thread without a run: the time since the first call.
pub fn now() -> Duration {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    if IN_RUN.get() {
        return NOW.get();
    }
    FIRST.get_or_init(Instant::now).elapsed()
}

/// Sets the clock error of the host that runs now, in milliseconds.
pub fn set_skew(millis: i64) {
    SKEW.set(millis);
}

/// The correct wall clock of the run, in milliseconds.
pub fn wall_millis() -> u64 {
    BEGINNING * 1_000 + u64::try_from(NOW.get().as_millis()).unwrap_or(u64::MAX)
}

/// The wall clock of the host that runs now, in milliseconds.
pub fn host_millis() -> u64 {
    wall_millis().saturating_add_signed(SKEW.get())
}

/// Converts `millis`, a wall clock time of the host that runs now, into the time since the run began.
pub fn from_host_millis(millis: u64) -> Duration {
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
mod replaced {
    use super::{host_millis, next_random, BEGINNING, IN_RUN, NOW};
    use libc::{c_int, c_long, c_uint, c_void, clockid_t, size_t, ssize_t, timespec};

    /// Replaces the clock that `SystemTime` and `Instant` read.
    ///
    /// # Safety
    ///
    /// As `clock_gettime(2)`: `time` points to a `timespec` that can be written, or is null.
    #[no_mangle]
    pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
        if !IN_RUN.get() || time.is_null() {
            return unsafe { libc::syscall(libc::SYS_clock_gettime, c_long::from(clock), time) } as c_int;
        }
        let (seconds, nanos) = if clock == libc::CLOCK_REALTIME || clock == libc::CLOCK_REALTIME_COARSE {
            let millis = host_millis();
            (millis / 1_000, millis % 1_000 * 1_000_000)
        } else {
            // The machine started long ago, so that a subtraction of an hour does not underflow.
            let now = NOW.get();
            (BEGINNING / 1_000 + now.as_secs(), u64::from(now.subsec_nanos()))
        };
        unsafe { *time = timespec { tv_sec: seconds as libc::time_t, tv_nsec: nanos as c_long } };
        0
    }

    /// Replaces the source that seeds the standard library and every generator.
    ///
    /// # Safety
    ///
    /// As `getrandom(2)`: `buffer` points to `length` bytes that can be written.
    #[no_mangle]
    pub unsafe extern "C" fn getrandom(buffer: *mut c_void, length: size_t, flags: c_uint) -> ssize_t {
        if !IN_RUN.get() {
            return unsafe { libc::syscall(libc::SYS_getrandom, buffer, length, c_long::from(flags)) } as ssize_t;
        }
        for at in 0..length {
            unsafe { *buffer.cast::<u8>().add(at) = next_random().to_le_bytes()[0] };
        }
        length as ssize_t
    }
}
