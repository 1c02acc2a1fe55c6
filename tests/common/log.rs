//! What the libraries say while a test runs is shown where the test fails, and nowhere else.
//!
//! duroxide's runtime installs a subscriber that writes past the test harness, unless one is there already: whatever makes
//! an account for a test calls [`keep`] first.

use tracing_subscriber::EnvFilter;

/// Keeps warnings, or what `RUST_LOG` asks for, for the test that may fail.
pub fn keep() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_test_writer();
    // Another test of this process may have been first, with the same.
    drop(log.try_init());
}
