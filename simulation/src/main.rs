//! Plays worlds and says which invariant did not hold in which.
#![allow(missing_docs)]

use simulation::world::{play, Plan};

fn main() {
    let _ = tracing::subscriber::set_global_default(tracing::subscriber::NoSubscriber::new());
    std::env::set_var("COSMOS_DISABLE_IMDS", "1");
    let seed: u64 = std::env::args().nth(1).and_then(|s| s.parse().ok()).unwrap_or(1);
    let real = std::time::Instant::now();
    let plan = Plan::draw(seed);
    let summary = plan.summary();
    let outcome = std::thread::spawn(move || play(plan)).join().unwrap();
    println!(
        "seed {seed}: {} in {:?}: {summary}; {:?}, {} requests, story {:016x}",
        if outcome.broken.is_none() { "ok" } else { "BROKEN" },
        real.elapsed(),
        outcome.lasted,
        outcome.requests,
        outcome.story.fingerprint()
    );
    if let Ok(path) = std::env::var("STORY") {
        std::fs::write(path, outcome.story.whole()).unwrap();
    }
    if let Some(broken) = outcome.broken {
        println!("{broken}");
        std::process::exit(1);
    }
}
