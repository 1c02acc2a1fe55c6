//! A worker renews all of its sessions, and one session that fails does not keep the others from being renewed.

use crate::fixture::*;
use duroxide::providers::{Provider, SessionFetchConfig, TagFilter};
use duroxide_cosmos::CosmosDBProvider;
use duroxide_cosmos_emulator::{RequestKind, WireAction, WireRule};
use std::{collections::BTreeSet, time::Duration};

const OWNER: &str = "worker";

fn session_key(n: usize) -> String {
    format!("$s:s{n}")
}

/// Writes sessions that [`OWNER`] owns for ten minutes and has just used.
async fn sessions_in_use(fixture: &Fixture, count: usize) {
    for n in 0..count {
        let session = serde_json::json!({
            "id": "session", "instanceId": session_key(n), "type": "session", "sessionId": format!("s{n}"),
            "owner": OWNER, "lockedUntil": now() + 600_000, "lastActivity": now(),
        });
        fixture.container().await.create_item(session_key(n), "session", &session, None).await.unwrap();
    }
}

/// Renews the sessions of [`OWNER`] for an hour.
async fn renew(provider: &CosmosDBProvider) -> Result<usize, duroxide::providers::ProviderError> {
    provider.renew_session_lock(&[OWNER], Duration::from_secs(3_600), LONG).await
}

/// The sessions whose locks last for more than half an hour.
async fn renewed(fixture: &Fixture) -> BTreeSet<String> {
    let documents = fixture.documents().await;
    let long =
        documents.iter().filter(|d| d["type"] == "session" && d["lockedUntil"].as_u64().unwrap() > now() + 1_800_000);
    long.map(|d| d["sessionId"].as_str().unwrap().to_owned()).collect()
}

fn unreachable(client: &str, key: String) -> WireRule {
    WireRule::new(WireAction::FailConnection).client(client).matching(move |request| goes_to(request, &key))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_of_1200_sessions_are_renewed_although_each_renewal_is_slow() {
    let fixture = Fixture::new(2);
    let a = fixture.provider_with("a", test_config().with_operation_timeout(Duration::from_secs(10))).await;
    sessions_in_use(&fixture, 1_200).await;
    let slow = WireRule::new(WireAction::Delay(Duration::from_millis(20))).on(RequestKind::Replace).client("a");
    fixture.account.wire().add(slow);
    assert_eq!(renew(&a).await.unwrap(), 1_200);
    assert_eq!(renewed(&fixture).await.len(), 1_200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_cannot_be_reached_does_not_prevent_the_renewal_of_the_others() {
    let fixture = Fixture::new(1);
    let a = fixture.provider_with("a", test_config().with_operation_timeout(Duration::from_secs(4))).await;
    sessions_in_use(&fixture, 8).await;
    let out_of_reach = fixture.account.wire().add(unreachable("a", session_key(0)));
    assert_eq!(renew(&a).await.unwrap(), 7);
    assert_eq!(renewed(&fixture).await, (1..8).map(|n| format!("s{n}")).collect());
    assert!(out_of_reach.hits() > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_fails_if_no_session_could_be_renewed() {
    let fixture = Fixture::new(1);
    let a = fixture.provider_with("a", test_config().with_operation_timeout(Duration::from_secs(4))).await;
    assert_eq!(renew(&a).await.unwrap(), 0, "nothing to renew is no failure");
    sessions_in_use(&fixture, 2).await;
    for n in 0..2 {
        fixture.account.wire().add(unreachable("a", session_key(n)));
    }
    let error = renew(&a).await.unwrap_err();
    assert!(error.is_retryable(), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_that_this_process_owns_are_renewed_although_they_cannot_be_listed() {
    let fixture = Fixture::new(4);
    let a = fixture.provider_with("a", test_config().with_operation_timeout(Duration::from_secs(4))).await;
    let work = (0..4u64).map(|n| activity_with("i", 2 + n, Some(&format!("s{n}")), None)).collect();
    begin(&a, "i", work, Vec::new()).await;
    let owner = SessionFetchConfig { owner_id: OWNER.to_owned(), lock_timeout: LONG };
    for _ in 0..4 {
        a.fetch_work_item(LONG, PATIENCE, Some(&owner), &TagFilter::Any).await.unwrap().expect("an activity");
    }
    let lists = |request: &duroxide_cosmos_emulator::WireRequest<'_>| request.partition_range.is_some();
    let unlisted = WireRule::new(WireAction::FailConnection).on(RequestKind::Query).client("a").matching(lists);
    fixture.account.wire().add(unlisted);
    assert_eq!(renew(&a).await.unwrap(), 4);
    assert_eq!(renewed(&fixture).await.len(), 4);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_cannot_be_read_does_not_prevent_the_renewal_of_the_others() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    sessions_in_use(&fixture, 2).await;
    let broken = serde_json::json!({
        "id": "session", "instanceId": "$s:odd", "type": "session", "sessionId": 7, "owner": OWNER,
        "lockedUntil": now() + 600_000, "lastActivity": now(),
    });
    fixture.container().await.create_item("$s:odd", "session", &broken, None).await.unwrap();
    assert_eq!(renew(&a).await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_releases_sessions_although_an_activity_cannot_be_reached() {
    let fixture = Fixture::new(1);
    let a = fixture.provider("a").await;
    begin(&a, "i", vec![activity("i", 2)], Vec::new()).await;
    begin(&a, "j", (2..22u64).map(|n| activity_with("j", n, Some(&format!("s{n}")), None)).collect(), Vec::new()).await;
    let owner = SessionFetchConfig { owner_id: OWNER.to_owned(), lock_timeout: LONG };
    for _ in 0..21 {
        a.fetch_work_item(LONG, PATIENCE, Some(&owner), &TagFilter::Any).await.unwrap().expect("an activity");
    }
    fixture.account.wire().add(unreachable("a", "i".to_owned()));
    // A session whose deletion Cosmos DB refuses does not prevent the release of the others either.
    let refuse = WireAction::Refuse { status: 403, substatus: None, retry_after: None };
    let refused = WireRule::new(refuse).client("a").matching(|request| goes_to(request, &session_key(2)));
    fixture.account.wire().add(refused);
    assert!(!a.shutdown_within(Duration::from_secs(8)).await, "not all locks could be released");
    let documents = fixture.documents().await;
    let left: Vec<_> = documents.iter().filter(|d| d["type"] == "session").map(|d| &d["sessionId"]).collect();
    assert_eq!(left, ["s2"]);
}
