//! `list` and `tree`.

use crate::fixture::Fixture;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_is_filtered_and_continued_by_its_cursor_and_a_tree_shows_the_children() {
    let fixture = Fixture::open().await;
    let runtime = fixture.start_worker().await;
    fixture.complete("parent-1", "Parent", "2").await;
    for n in 0..5 {
        fixture.complete(&format!("greeting-{n}"), "Greeting", "Ada").await;
    }
    let page = fixture.json(&["list", "--name", "Greeting", "--limit", "3", "--text", "GREETING"]).await;
    let ids: Vec<&str> = page.iter().filter_map(|line| line["id"].as_str()).collect();
    let is_of_tree = |id: &&str| id.contains("parent");
    assert_eq!(ids.iter().filter(|id| !is_of_tree(id)).count(), 3, "{page:?}");
    let cursor = page.last().unwrap()["cursor"].as_str().expect("there are more").to_owned();
    let rest = fixture.json(&["list", "--name", "Greeting", "--text", "greeting-", "--cursor", &cursor]).await;
    let mut both: Vec<String> =
        page.iter().chain(&rest).filter_map(|line| Some(line["id"].as_str()?.to_owned())).collect();
    both.sort();
    assert_eq!(both, (0..5).map(|n| format!("greeting-{n}")).collect::<Vec<_>>());
    assert!(fixture.json(&["list", "--status", "failed"]).await.is_empty());
    assert!(fixture.json(&["list", "--older-than", "1h"]).await.is_empty());
    assert_eq!(fixture.json(&["list", "--all"]).await.len(), 8);
    let tree = fixture.json(&["tree", "parent-1"]).await;
    let depths: Vec<_> = tree.iter().map(|line| line["depth"].as_u64().unwrap()).collect();
    assert_eq!(depths, [0, 1, 1], "{tree:?}");
    let ran = fixture.run(&["tree", "parent-1"]).await;
    assert!(ran.out.starts_with("parent-1  Parent Completed\n  "), "{}", ran.out);
    runtime.shutdown(None).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_refuses_invalid_ages_cursors_and_empty_filters() {
    let fixture = Fixture::open().await;
    let ran = fixture.run(&["list", "--older-than", "soon"]).await;
    assert_eq!(ran.code, 2);
    assert!(ran.err.contains("write 90s, 15m, 2h or 7d"), "{ran:?}");
    let ran = fixture.run(&["list", "--cursor", "rubbish"]).await;
    assert_eq!(ran.code, 1);
    assert!(ran.err.contains("is not a cursor"), "{ran:?}");
    let ran = fixture.run(&["list", "--name", ""]).await;
    assert_eq!(ran.code, 2, "an empty filter is invalid: {ran:?}");
}
