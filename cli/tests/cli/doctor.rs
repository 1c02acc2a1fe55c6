//! `doctor`.

use crate::fixture::Fixture;
use serde_json::Value;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_doctor_names_the_damage_and_repairs_it_on_demand() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    fixture.complete("healthy", "Parent", "2").await;
    fixture.start_order("order", "two books").await;
    let ran = fixture.run(&["doctor", "order"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("waits for event approval") && ran.out.contains("nothing is wrong"), "{ran:?}");
    assert_eq!(fixture.run(&["doctor", "missing"]).await.code, 3);
    fixture.delete_instance_document("order").await;
    let ran = fixture.run(&["doctor", "order"]).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.out.contains("lost instance") && ran.out.contains("repair: rebuild it from the history"), "{ran:?}");
    assert!(ran.out.contains("--repair repairs 1"), "{ran:?}");
    // Without a terminal the user cannot answer, so nothing changes.
    let ran = fixture.run(&["doctor", "--all", "--repair"]).await;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.err.contains("add --yes"), "{ran:?}");
    let found = fixture.run(&["doctor", "--all", "--json"]).await;
    let lines: Vec<Value> = found.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!((found.code, lines.len()), (1, 1), "{found:?}");
    assert_eq!((lines[0]["kind"].as_str(), lines[0]["instance"].as_str()), (Some("diagnosis"), Some("order")));
    let finding = &lines[0]["findings"][0];
    assert_eq!((finding["reason"].as_str(), finding["remedy"].as_str()), (Some("lostInstance"), Some("repair")));
    let ran = fixture.run(&["doctor", "--all", "--repair", "--yes"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("repaired 1 findings"), "{ran:?}");
    let ran = fixture.run(&["doctor", "--all"]).await;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.out.contains("0 with findings"), "{ran:?}");
    // The repaired instance continues.
    fixture.run(&["raise", "order", "approval", "yes"]).await;
    let ran = fixture.run(&["wait", "order"]).await;
    assert_eq!((ran.code, ran.out.trim()), (0, "shipped two books"), "{ran:?}");
    runtime.shutdown(None).await;
}
