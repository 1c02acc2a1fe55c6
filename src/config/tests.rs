//! Defaults, settings and validation.

use super::*;
use crate::{Clock, Cloud, Randomness};
use azure_data_cosmos::{options::Region, RoutingStrategy};

const ENDPOINT: &str = "https://acc.documents.azure.com/";

fn config() -> CosmosDBProviderConfig {
    CosmosDBProviderConfig::default().with_endpoint(ENDPOINT).with_credential(Credential::managed_identity())
}

fn problem(config: CosmosDBProviderConfig) -> String {
    config.validate().unwrap_err().to_string()
}

#[test]
fn the_defaults_are_the_documented_ones_and_lack_only_endpoint_and_credential() {
    let config = CosmosDBProviderConfig::default();
    assert_eq!((config.database(), config.container()), ("duroxide", "duroxide"));
    assert_eq!(config.reconciler_age_threshold(), Duration::from_secs(2));
    assert_eq!(config.request_timeout(), Duration::from_secs(3));
    assert_eq!(config.operation_timeout(), Duration::from_secs(10));
    assert_eq!(config.wakeup_interval(), Duration::from_millis(250));
    assert_eq!(config.poll_interval(), Duration::from_secs(3));
    assert!(config.inline_claims());
    assert_eq!(config.retention(), &Retention::default());
    assert_eq!(config.read_staleness(), Duration::from_millis(50));
    assert_eq!(config.history_cache_bytes(), 64 << 20);
    assert_eq!(config.throughput(), Throughput::ServerlessOrShared);
    assert_eq!(config.routing_strategy(), RoutingStrategy::PreferredRegions(vec![]));

    let ConfigError::Several(problems) = config.validate().unwrap_err() else {
        panic!("expected two problems");
    };
    assert!(matches!(problems.as_slice(), [ConfigError::Missing { .. }, ConfigError::Missing { .. }]));
    assert!(config.account_reference().is_err());
    assert_eq!(config.credential_kind(), "none");
}

#[test]
fn each_setting_returns_its_value() {
    let second = Duration::from_secs(1);
    let config = config()
        .with_cloud(Cloud::China)
        .with_token_scope("https://x/.default")
        .with_database("db")
        .with_container("box")
        .with_create_if_missing(true)
        .with_throughput(Throughput::Manual(400))
        .with_reconciler_age_threshold(second * 2)
        .with_request_timeout(second * 3)
        .with_operation_timeout(second * 4)
        .with_wakeup_interval(second * 5)
        .with_poll_interval(second * 6)
        .with_inline_claims(false)
        .with_retention(Retention::default().with_failed(second))
        .with_history_cache_bytes(0)
        .with_user_agent_suffix("orders")
        .with_clock(Clock::from_fn(|| 7))
        .with_randomness(Randomness::seeded(7));
    assert_eq!(config.validate(), Ok(()));
    assert_eq!(config.endpoint(), Some(ENDPOINT));
    assert!(config.credential().is_some());
    assert_eq!(config.cloud(), &Cloud::China);
    assert_eq!(config.token_scope(), Some("https://x/.default"));
    assert_eq!((config.database(), config.container()), ("db", "box"));
    assert!(config.create_if_missing());
    assert_eq!(config.throughput(), Throughput::Manual(400));
    assert_eq!(config.reconciler_age_threshold(), second * 2);
    assert_eq!(config.request_timeout(), second * 3);
    assert_eq!(config.operation_timeout(), second * 4);
    assert_eq!(config.wakeup_interval(), second * 5);
    assert_eq!(config.poll_interval(), second * 6);
    assert!(!config.inline_claims());
    assert_eq!(config.retention().failed(), Some(second));
    assert_eq!(config.history_cache_bytes(), 0);
    assert_eq!(config.user_agent_suffix(), "orders");
    assert_eq!(config.clock().now(), 7);
    assert_eq!(config.randomness().token(), Randomness::seeded(7).token());
    assert!(config.account_reference().is_ok());
}

#[test]
fn one_region_is_proximity_and_several_are_an_order() {
    let near = config().with_region("West Europe");
    assert_eq!(near.routing_strategy(), RoutingStrategy::ProximityTo(Region::WEST_EUROPE));
    let order = config().with_preferred_regions(["northeurope", "West Europe"]);
    assert_eq!(
        order.routing_strategy(),
        RoutingStrategy::PreferredRegions(vec![Region::NORTH_EUROPE, Region::WEST_EUROPE])
    );
    assert_eq!(order.preferred_regions().len(), 2);
    let unknown = config().with_region("Atlantis North");
    assert_eq!(unknown.routing_strategy(), RoutingStrategy::PreferredRegions(vec![Region::new("atlantisnorth")]));
    assert!(problem(config().with_region(" ")).contains("COSMOS_REGION"));
}

#[test]
fn only_account_keys_create_the_container_by_default() {
    assert!(!config().create_if_missing());
    assert!(config().with_create_if_missing(true).create_if_missing());
    #[cfg(feature = "key_auth")]
    {
        let keyed = config().with_credential(Credential::account_key("a2V5"));
        assert!(keyed.create_if_missing());
        assert!(!keyed.with_create_if_missing(false).create_if_missing());
    }
}

#[test]
fn each_unusable_setting_is_named() {
    let second = Duration::from_secs(1);
    for (config, named) in [
        (config().with_endpoint("acc"), "COSMOS_ENDPOINT"),
        (config().with_database(""), "COSMOS_DATABASE"),
        (config().with_database("a/b"), "must not contain"),
        (config().with_container("  "), "COSMOS_CONTAINER"),
        (config().with_container("a "), "end with a space"),
        (config().with_container("x".repeat(256)), "255"),
        (config().with_wakeup_interval(Duration::ZERO), "wakeup_interval"),
        (config().with_poll_interval(Duration::ZERO), "poll_interval"),
        (config().with_request_timeout(Duration::ZERO), "100 ms"),
        (config().with_request_timeout(second * 11), "operation_timeout"),
        (config().with_request_timeout(second / 2).with_operation_timeout(second * 9 / 10), "at least 1 s"),
        (config().with_user_agent_suffix("a b"), "user_agent_suffix"),
        (config().with_user_agent_suffix("x".repeat(26)), "at most 25"),
        (config().with_token_scope(""), "AZURE_COSMOS_AAD_SCOPE_OVERRIDE"),
        (config().with_throughput(Throughput::Manual(399)), "COSMOS_THROUGHPUT"),
        (config().with_credential(Credential::client_secret("", "", "")), "AZURE_CLIENT_SECRET"),
        (config().with_cloud(Cloud::Custom { authority_host: "x".into() }), "AZURE_AUTHORITY_HOST"),
    ] {
        let shown = format!("{config:?}");
        let problem = problem(config);
        assert!(problem.contains(named), "{problem} for {shown}");
        assert!(!problem.contains("problems"), "one mistake, one problem: {problem}");
    }
}

#[test]
fn all_problems_are_reported_at_once() {
    let problem = problem(config().with_database("").with_wakeup_interval(Duration::ZERO));
    assert!(problem.contains("COSMOS_DATABASE") && problem.contains("wakeup_interval"));
}

#[cfg(feature = "key_auth")]
#[test]
fn a_connection_string_has_an_endpoint_and_another_endpoint_contradicts_it() {
    let text = "AccountEndpoint=https://acc.documents.azure.com:443/;AccountKey=c2VjcmV0;";
    let credential = Credential::connection_string(text).unwrap();
    let config = CosmosDBProviderConfig::default().with_credential(credential);
    assert_eq!(config.endpoint(), Some(ENDPOINT));
    assert_eq!(config.validate(), Ok(()));
    assert!(config.account_reference().is_ok());
    assert_eq!(config.clone().with_endpoint(ENDPOINT).validate(), Ok(()));

    let other = config.with_endpoint("https://other.documents.azure.com/");
    assert!(matches!(other.validate(), Err(ConfigError::Contradiction { .. })));
    assert!(!problem(other).contains("c2VjcmV0"));
}

#[test]
fn debug_distinguishes_a_simulated_provider_from_a_real_one() {
    let real = format!("{:?}", config());
    assert!(real.contains("Clock(system)") && real.contains("Randomness(system)"), "{real}");
    let simulated = config().with_clock(Clock::from_fn(|| 0)).with_randomness(Randomness::seeded(0));
    let simulated = format!("{simulated:?}");
    assert!(simulated.contains("Clock(given)") && simulated.contains("Randomness(seeded)"), "{simulated}");
}

#[test]
fn debug_shows_no_secret() {
    let mut configs = vec![
        config().with_credential(Credential::client_secret("t", "c", "c2VjcmV0")),
        config().with_endpoint("https://acc.documents.azure.com/;AccountKey=c2VjcmV0"),
        config().with_endpoint("https://x:c2VjcmV0@acc.documents.azure.com/"),
    ];
    #[cfg(feature = "key_auth")]
    configs.push(config().with_credential(Credential::account_key("c2VjcmV0")));
    configs.push(config());
    for config in configs {
        let shown = format!("{config:?} {config:#?}");
        assert!(!shown.contains("c2VjcmV0"), "{shown}");
    }
}
