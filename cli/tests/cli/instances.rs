//! `start`, `show`, `wait`, `watch`, `raise` and `cancel` on one instance.

use crate::fixture::{Fixture, PATIENCE};
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_starts_an_instance_raises_its_event_and_waits_for_its_end() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    let ran = fixture.run(&["start", "Order", "two books", "--instance", "order-1"]).await;
    assert_eq!((ran.code, ran.out.trim()), (0, "started order-1"), "{ran:?}");
    fixture.client.wait_for_status_change("order-1", 0, Duration::from_millis(20), PATIENCE).await.unwrap();
    let ran = fixture.run(&["start", "Order", "again", "--instance", "order-1"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("exists already"), "{ran:?}");
    let ran = fixture.run(&["wait", "order-1", "--timeout", "1s"]).await;
    assert_eq!(ran.code, 4, "{ran:?}");
    let ran = fixture.run(&["show", "order-1"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    for text in ["Order 1.0.0, Running", "status: waiting for approval", "waits  event", "waits  timer"] {
        assert!(ran.out.contains(text), "{text}: {}", ran.out);
    }
    assert_eq!(fixture.run(&["raise", "order-1", "approval", "yes"]).await.code, 0);
    let ran = fixture.run(&["wait", "order-1"]).await;
    assert_eq!((ran.code, ran.out.trim()), (0, "shipped two books"), "{ran:?}");
    let ran = fixture.run(&["raise", "order-1", "approval", "yes"]).await;
    assert_eq!(ran.code, 3, "the instance has ended: {ran:?}");
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn show_and_watch_print_the_whole_history_of_an_ended_instance() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    fixture.start_order("order-1", "two books").await;
    fixture.client.raise_event("order-1", "approval", "yes").await.unwrap();
    fixture.client.wait_for_orchestration("order-1", PATIENCE).await.unwrap();
    let lines = fixture.json(&["show", "order-1"]).await;
    assert_eq!((&lines[0]["id"], &lines[0]["status"]), (&"order-1".into(), &"Completed".into()));
    let shipped = lines.iter().find(|line| line["what"] == "activity").expect("the activity");
    assert_eq!((&shipped["name"], &shipped["state"]), (&"Ship".into(), &"done".into()));
    assert!(shipped["ended"].as_u64() >= shipped["at"].as_u64());
    let approval = lines.iter().find(|line| line["what"] == "event").expect("the event");
    assert_eq!((&approval["name"], &approval["state"]), (&"approval".into(), &"done".into()), "the event has arrived");
    assert!(lines.iter().all(|line| line["kind"].is_string()), "each object names its type");
    assert!(lines.iter().all(|line| line["input"].is_null()), "payloads are on demand");
    let lines = fixture.json(&["show", "order-1", "--payloads"]).await;
    assert!(lines.iter().any(|line| line["input"] == "two books"), "{lines:?}");
    let ran = fixture.run(&["watch", "order-1"]).await;
    assert_eq!(ran.code, 0);
    assert!(ran.out.contains("completed: shipped two books"), "{ran:?}");
    let watched = fixture.json(&["watch", "order-1"]).await;
    assert_eq!(watched.last().unwrap()["kind"], "end");
    let events = watched.iter().filter(|line| line["kind"] == "event").count();
    let history = fixture.client.read_execution_history("order-1", 1).await.unwrap().len();
    assert_eq!(events, history, "every event is printed");
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cancelled_instance_and_a_missing_instance_have_exit_codes_of_their_own() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    fixture.start_order("order-1", "a book").await;
    assert_eq!(fixture.run(&["cancel", "order-1", "--reason", "sold out"]).await.code, 0);
    let ran = fixture.run(&["wait", "order-1"]).await;
    assert_eq!(ran.code, 5, "{ran:?}");
    assert!(ran.err.contains("sold out"), "{ran:?}");
    for command in ["show", "tree", "watch", "cancel"] {
        let ran = fixture.run(&[command, "missing"]).await;
        assert_eq!(ran.code, 3, "{command}: {ran:?}");
        assert!(ran.err.contains("there is no instance \"missing\""), "{ran:?}");
    }
    runtime.shutdown(None).await;
}
