//! `check`: one line for each property of the account and the container.

use duroxide_cosmos::{
    operate::{self, CheckStatus},
    CosmosDBProvider, CosmosDBProviderConfig, Credential,
};
use duroxide_cosmos_emulator::LocalAccount;

#[tokio::test]
async fn a_check_has_a_line_for_each_property_and_creates_nothing() {
    let account = LocalAccount::new();
    let served = account.serve("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let key = Credential::account_key(account.key().to_owned());
    let config = CosmosDBProviderConfig::default().with_endpoint(served.endpoint()).with_credential(key);
    let checks = operate::check(&config.clone().with_create_if_missing(true)).await;
    let last = checks.last().unwrap();
    assert_eq!((last.subject.as_str(), last.status), ("container", CheckStatus::Warning), "it would be made");
    let checks = operate::check(&config.clone().with_create_if_missing(false)).await;
    let last = checks.last().unwrap();
    assert_eq!((last.subject.as_str(), last.status), ("container", CheckStatus::Failed));
    assert!(last.detail.contains("az cosmosdb sql container create"), "{}", last.detail);
    CosmosDBProvider::new_with_config(config.clone()).await.unwrap();
    let checks = operate::check(&config).await;
    let told: Vec<_> = checks.iter().map(|check| (check.subject.as_str(), check.status)).collect();
    let subjects = [
        "configuration",
        "account",
        "container",
        "partition key",
        "index",
        "time to live",
        "throughput",
        "regions",
        "format",
    ];
    let fine = subjects.into_iter().chain(["role"]).map(|subject| (subject, CheckStatus::Ok));
    let expected: Vec<_> = fine.chain([("consistency", CheckStatus::Unknown)]).collect();
    assert_eq!(told, expected);
    let wrong = Credential::account_key("d3Jvbmc=".to_owned());
    let checks = operate::check(&config.clone().with_credential(wrong)).await;
    let last = checks.last().unwrap();
    assert_eq!((last.subject.as_str(), last.status), ("account", CheckStatus::Failed), "{checks:?}");
    assert!(!format!("{checks:?}").contains("d3Jvbmc="), "no key is shown");
    let checks = operate::check(&CosmosDBProviderConfig::default()).await;
    assert_eq!((checks.len(), checks[0].subject.as_str(), checks[0].status), (1, "configuration", CheckStatus::Failed));
}
