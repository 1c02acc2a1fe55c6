//! `check --deep`: every line is ok on an account that behaves as Cosmos DB does, and a misbehaviour fails its own
//! line.

use duroxide_cosmos::{
    operate::{check_deep, Check, CheckStatus},
    CosmosDBProvider, CosmosDBProviderConfig, Credential,
};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use std::net::Ipv4Addr;

/// An account with a container, served over HTTP.
struct ServedAccount {
    account: LocalAccount,
    config: CosmosDBProviderConfig,
    _served: Served,
}

impl ServedAccount {
    async fn new() -> Self {
        let account = LocalAccount::builder().with_partitions(4).build();
        let served = account.serve((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
        let config = CosmosDBProviderConfig::default()
            .with_endpoint(served.endpoint())
            .with_credential(Credential::account_key(account.key().to_owned()));
        CosmosDBProvider::new_with_config(config.clone()).await.unwrap();
        Self { account, config, _served: served }
    }

    /// The lines of the check while the account misbehaves in this way.
    async fn checked(&self, misbehaviour: &str) -> Vec<Check> {
        let handle = self.account.wire().misbehave(misbehaviour.parse().unwrap());
        let checks = check_deep(&self.config).await;
        handle.remove();
        checks
    }
}

fn line<'c>(checks: &'c [Check], subject: &str) -> &'c Check {
    let found = checks.iter().find(|check| check.subject == subject);
    found.unwrap_or_else(|| panic!("no line {subject} in {checks:#?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_correct_account_every_line_is_ok_and_no_document_is_left() {
    let served = ServedAccount::new().await;
    let before = served.account.documents("duroxide", "duroxide").len();
    let checks = check_deep(&served.config).await;
    let odd: Vec<&Check> =
        checks.iter().filter(|check| !matches!(check.status, CheckStatus::Ok | CheckStatus::Unknown)).collect();
    assert!(odd.is_empty(), "{odd:#?}");
    assert!(checks.len() >= 35, "{} lines", checks.len());
    assert_eq!(served.account.documents("duroxide", "duroxide").len(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_misbehaviour_fails_its_line() {
    let cases: [(&str, &[(&str, &str)]); 8] = [
        (
            "batches-not-atomic",
            &[
                ("batch probe", "does not roll back"),
                ("batch 409", "a part of it was done"),
                ("batch 404", "a part of it"),
            ],
        ),
        ("batches-ignore-if-match", &[("batch probe", "ignores ifMatch"), ("batch 412", "the batch was committed")]),
        (
            "refuse-query=knownBy",
            &[
                ("query due_turns", "400"),
                ("query due_activity_rows", "400"),
                ("query due", "400"),
                ("query texts", "43 of 46 accepted"),
            ],
        ),
        ("full-answers", &[("short answers", "returned its document")]),
        ("refuse-priority", &[("low priority", "400")]),
        ("refuse-latest-committed", &[("quorum reads", "400"), ("write region", "400")]),
        ("charges-times=8", &[("prices at 1 KB", "create 42.80 (5.35)"), ("price of a query", "20.0")]),
        ("no-time-to-live", &[("expiry", "was there after")]),
    ];
    let served = ServedAccount::new().await;
    let before = served.account.documents("duroxide", "duroxide").len();
    for (misbehaviour, lines) in cases {
        let checks = served.checked(misbehaviour).await;
        let left = served.account.documents("duroxide", "duroxide").len() - before;
        assert_eq!(left, 0, "{misbehaviour}: something is left behind");
        for (subject, answer) in lines {
            let line = line(&checks, subject);
            assert_eq!(line.status, CheckStatus::Differs, "{misbehaviour}: {line:?}");
            assert!(line.detail.contains(answer) && line.detail.contains("Consequence: "), "{misbehaviour}: {line:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn differences_that_the_provider_tolerates_are_ok_and_reported() {
    let served = ServedAccount::new().await;
    for (misbehaviour, subject, told) in [
        ("empty-pages", "pages and order", "7 rows"),
        ("small-pages=1", "pages and order", "7 rows"),
        ("slow-pages=300ms", "query texts", "46 of 46 accepted, the slowest within"),
        ("scan-unindexed", "refused queries", "a filter on a path without index is accepted"),
    ] {
        let checks = served.checked(misbehaviour).await;
        let line = line(&checks, subject);
        assert!(line.status == CheckStatus::Ok && line.detail.contains(told), "{misbehaviour}: {line:?}");
        let odd: Vec<&Check> =
            checks.iter().filter(|check| !matches!(check.status, CheckStatus::Ok | CheckStatus::Unknown)).collect();
        assert!(odd.is_empty(), "{misbehaviour}: {odd:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_account_whose_batches_return_no_etags_fails_from_the_first_read_that_needs_one() {
    let served = ServedAccount::new().await;
    let checks = served.checked("batches-without-etags").await;
    let format = line(&checks, "format");
    assert!(format.status == CheckStatus::Failed && format.detail.contains("no ETag"), "{format:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_identity_without_access_gets_the_reason() {
    let served = ServedAccount::new().await;
    for (misbehaviour, advice) in [
        ("forbidden=5301", "Data Contributor"),
        ("forbidden=5202", "disableLocalAuth"),
        ("forbidden=5307", "perimeter"),
        ("forbidden", "--ip-range-filter"),
        ("unauthorized", "clock"),
    ] {
        let checks = served.checked(misbehaviour).await;
        let wrong = checks.iter().find(|check| check.status == CheckStatus::Failed).expect("something is wrong");
        assert!(wrong.detail.contains(advice), "{misbehaviour}: {wrong:?}");
        assert_eq!(checks.last().unwrap().subject, "deep check", "it is not begun");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_no_provider_has_opened_yet_is_checked_like_any_other() {
    let served = ServedAccount::new().await;
    let container = served.account.client_named("operator").await.database_client("duroxide");
    let container = container.container_client("duroxide", None).await.unwrap();
    container.delete_item("$d:format", "format", None).await.unwrap();
    let checks = check_deep(&served.config).await;
    assert!(line(&checks, "format").detail.contains("none yet"));
    let odd: Vec<&Check> =
        checks.iter().filter(|check| !matches!(check.status, CheckStatus::Ok | CheckStatus::Unknown)).collect();
    assert!(odd.is_empty(), "{odd:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_checks_of_one_container_at_the_same_time_do_not_affect_each_other() {
    let served = ServedAccount::new().await;
    let (one, other) = tokio::join!(check_deep(&served.config), check_deep(&served.config));
    let odd: Vec<&Check> = one
        .iter()
        .chain(&other)
        .filter(|check| !matches!(check.status, CheckStatus::Ok | CheckStatus::Unknown))
        .collect();
    assert!(odd.is_empty(), "{odd:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn documents_of_an_interrupted_check_do_not_change_the_result_of_the_next_one() {
    let served = ServedAccount::new().await;
    let cut = tokio::spawn({
        let config = served.config.clone();
        async move { check_deep(&config).await }
    });
    let left = || served.account.documents("duroxide", "duroxide").into_iter().any(|d| d["id"] == "probe:page-6");
    while !left() {
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    cut.abort();
    let _ = cut.await;
    let checks = check_deep(&served.config).await;
    let odd: Vec<&Check> =
        checks.iter().filter(|check| !matches!(check.status, CheckStatus::Ok | CheckStatus::Unknown)).collect();
    assert!(odd.is_empty(), "{odd:#?}");
}
