//! Starts that no worker has taken.

use crate::fixture::{start_message, Fixture, PATIENCE};
use duroxide::providers::Provider;
use serde_json::Value;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_start_is_refused_while_the_first_waits_for_a_worker() {
    let fixture = Fixture::open().await;
    assert_eq!(fixture.run(&["start", "Greeting", "Ada", "--instance", "i"]).await.code, 0);
    let ran = fixture.run(&["start", "Greeting", "Bob", "--instance", "i"]).await;
    assert_eq!((ran.code, ran.out.as_str()), (1, ""), "{ran:?}");
    assert!(ran.err.contains("a start of \"i\" waits for a worker"), "{ran:?}");
    assert_eq!(fixture.waiting_messages().await, 1);
    // A start that is due later counts as well.
    fixture.provider.enqueue_for_orchestrator(start_message("later", None), Some(PATIENCE)).await.unwrap();
    assert_eq!(fixture.run(&["start", "Greeting", "Bob", "--instance", "later"]).await.code, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_no_worker_has_taken_is_cancelled() {
    let fixture = Fixture::open().await;
    fixture.run(&["start", "Order", "a book", "--instance", "i"]).await;
    let ran = fixture.run(&["cancel", "i", "--reason", "sold out"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let runtime = fixture.start_worker().await;
    let ran = fixture.run(&["wait", "i"]).await;
    assert_eq!(ran.code, 5, "{ran:?}");
    assert!(ran.err.contains("sold out"), "{ran:?}");
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_no_worker_has_taken_is_deleted_with_the_messages_that_wait_for_it() {
    let fixture = Fixture::open().await;
    fixture.run(&["start", "Greeting", "Ada", "--instance", "i"]).await;
    fixture.run(&["cancel", "i"]).await;
    let ran = fixture.run(&["delete", "i", "--yes"]).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("--force"), "{ran:?}");
    let ran = fixture.run(&["delete", "i", "--force", "--dry-run"]).await;
    assert!(ran.out.contains("Greeting") && ran.out.contains("dry run: 1 instances"), "{ran:?}");
    assert_eq!(fixture.waiting_messages().await, 2);
    let ran = fixture.run(&["delete", "i", "--force", "--yes", "--json"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    let last: Value = serde_json::from_str(ran.out.lines().last().expect("a line")).unwrap();
    assert_eq!(last["deletedInstances"], 1, "{ran:?}");
    assert_eq!(fixture.waiting_messages().await, 0, "neither the start nor the cancellation is left");
    assert_eq!(fixture.run(&["delete", "i", "--force", "--yes"]).await.code, 3, "it no longer exists");
    // The id is free, and no message of the former start is left for the new instance.
    assert_eq!(fixture.run(&["start", "Greeting", "Bob", "--instance", "i"]).await.code, 0);
    let runtime = fixture.start_worker().await;
    let ran = fixture.run(&["wait", "i"]).await;
    assert_eq!((ran.code, ran.out.trim()), (0, "Hello, Bob!"), "{ran:?}");
    runtime.shutdown(None).await;
}
