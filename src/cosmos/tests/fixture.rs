//! The shared fixture: an account, a store on it, and small documents.

use crate::{
    config::CosmosDBProviderConfig,
    cosmos::{bootstrap, connect, Deadline, Freshness, Store, StoreError, Versioned, WriteOutcome},
    credential::Credential,
    model::{id::encode, DocumentId, Partition},
};
use azure_core::http::Etag;
use azure_data_cosmos::{fault_injection::FaultInjectionRule, CosmosClient};
use duroxide_cosmos_emulator::{LocalAccount, RequestKind, Served, WireAction, WireRule, WireRuleHandle};
use serde::{Deserialize, Serialize};
use std::{future::Future, net::Ipv4Addr, sync::Arc, time::Duration};

/// The client's name on the wire.
pub(super) const CLIENT: &str = "store-tests";

/// The deadline of a call that must succeed.
const GENEROUS: Duration = Duration::from_secs(20);

/// The deadline of a call whose lock is about to expire.
pub(super) const SHORT: Duration = Duration::from_millis(300);

/// Far longer than [`SHORT`], and far shorter than the SDK's own retries.
const BOUND: Duration = Duration::from_secs(5);

/// Runs each test with a store in process and with one over HTTP.
macro_rules! both_ways {
    ($($name:ident),+ $(,)?) => {
        mod in_process {
            $(#[tokio::test]
            async fn $name() {
                super::$name($crate::cosmos::tests::fixture::StoreFixture::in_process().await).await;
            })+
        }
        mod over_http {
            $(#[tokio::test]
            async fn $name() {
                super::$name($crate::cosmos::tests::fixture::StoreFixture::over_http().await).await;
            })+
        }
    };
}
pub(super) use both_ways;

/// An account with four physical partitions in each container, and a store on it.
pub(super) struct StoreFixture {
    pub(super) account: LocalAccount,
    pub(super) store: Store,
    _served: Option<Served>,
}

impl StoreFixture {
    pub(super) async fn in_process() -> Self {
        Self::with_rules(Vec::new()).await
    }

    /// In process, with fault rules of the SDK. They apply after the store is open.
    pub(super) async fn with_rules(rules: Vec<Arc<FaultInjectionRule>>) -> Self {
        let account = account();
        rules.iter().for_each(|rule| rule.disable());
        let client = client(&account, rules.clone()).await;
        let store = bootstrap::open(&client, &config(&account), None).await.unwrap();
        rules.iter().for_each(|rule| rule.enable());
        Self::opened(account, store, None)
    }

    /// Resets the statistics, so that a test does not count the requests of opening.
    fn opened(account: LocalAccount, store: Store, served: Option<Served>) -> Self {
        account.reset_stats();
        Self { account, store, _served: served }
    }

    pub(super) async fn over_http() -> Self {
        let account = account();
        let config = config(&account);
        Self::served(account, config).await
    }

    /// Over HTTP, signed in with the token "token", in a container that an operator created.
    pub(super) async fn over_http_with(credential: Credential) -> Self {
        let account = account();
        account.accept_token("token");
        let operator = account.client_named("operator").await;
        bootstrap::open(&operator, &config(&account), None).await.unwrap();
        let config = config(&account).with_credential(credential);
        Self::served(account, config).await
    }

    async fn served(account: LocalAccount, config: CosmosDBProviderConfig) -> Self {
        let served = account.serve((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
        let config = config.with_endpoint(served.endpoint());
        let (client, tokens) = connect::connect(&config).await.unwrap();
        let store = bootstrap::open(&client, &config, tokens).await.unwrap();
        Self::opened(account, store, Some(served))
    }

    /// With time for a request of 2 MB on a busy machine. A request that times out is repeated, and its own first write
    /// would refuse it.
    pub(super) fn patient(mut self) -> Self {
        let store = Arc::get_mut(&mut self.store.inner).expect("the fixture has the only reference to the store");
        store.attempt_time = Duration::from_secs(60);
        self
    }

    /// Makes the wire misbehave for this kind of request until the rule is removed.
    pub(super) fn on(&self, kind: RequestKind, action: WireAction) -> WireRuleHandle {
        self.account.wire().add(WireRule::new(action).on(kind).client(CLIENT))
    }

    /// Makes the wire misbehave for the next `times` requests of this kind.
    pub(super) fn next(&self, times: u64, kind: RequestKind, action: WireAction) -> WireRuleHandle {
        self.account.wire().add(WireRule::new(action).on(kind).client(CLIENT).times(times))
    }

    /// Creates a note and returns its ETag.
    pub(super) async fn given(&self, note: &Note) -> Etag {
        done(self.store.create(&note.instance_id, &note.id, note, in_time()).await)
    }

    /// The stored note with this id, by an authoritative read.
    pub(super) async fn stored(&self, note: &Note) -> Option<Versioned<Note>> {
        self.store.read(&note.instance_id, &note.id, Freshness::Authoritative, in_time()).await.unwrap()
    }

    /// The text of the stored note with this id.
    pub(super) async fn text(&self, note: &Note) -> Option<String> {
        self.stored(note).await.map(|found| found.document.text)
    }
}

pub(super) fn account() -> LocalAccount {
    LocalAccount::builder().with_partitions(4).build()
}

pub(super) fn config(account: &LocalAccount) -> CosmosDBProviderConfig {
    CosmosDBProviderConfig::default()
        .with_credential(Credential::account_key(account.key().to_owned()))
        .with_user_agent_suffix(CLIENT)
        .with_request_timeout(Duration::from_secs(1))
}

/// A client in process, with the timeouts of the provider's own client.
pub(super) async fn client(account: &LocalAccount, rules: Vec<Arc<FaultInjectionRule>>) -> CosmosClient {
    let pool = connect::connection_pool(&config(account)).unwrap();
    account.client_with_pool(CLIENT, pool, rules, |builder| builder).await.unwrap()
}

/// A document of these tests.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Note {
    pub(super) id: DocumentId,
    pub(super) instance_id: Partition,
    pub(super) r#type: String,
    /// Stored as `name`, which is indexed.
    #[serde(rename = "name")]
    pub(super) text: String,
}

/// The note `name` in the partition of `instance`.
pub(super) fn note(instance: &str, name: &str, text: impl Into<String>) -> Note {
    Note {
        id: DocumentId::new("note", &[&encode(name)]),
        instance_id: Partition::instance(instance).unwrap(),
        r#type: "note".to_owned(),
        text: text.into(),
    }
}

impl Note {
    pub(super) fn with_text(&self, text: impl Into<String>) -> Self {
        Self { text: text.into(), ..self.clone() }
    }
}

/// A deadline that no healthy call reaches.
pub(super) fn in_time() -> Deadline {
    Deadline::after(GENEROUS)
}

/// Runs a call whose deadline is [`SHORT`]. Fails if the SDK's own retries outlast that deadline.
pub(super) async fn cut_short<T>(call: impl Future<Output = T>) -> T {
    tokio::time::timeout(BOUND, call).await.expect("the deadline is kept")
}

/// The ETag of a write that must succeed.
#[track_caller]
pub(super) fn done(outcome: Result<WriteOutcome, StoreError>) -> Etag {
    match outcome {
        Ok(WriteOutcome::Done(etag)) => etag,
        other => panic!("not done: {other:?}"),
    }
}

/// A refusal by the service, which applies nothing.
pub(super) fn refuse(status: u16) -> WireAction {
    refuse_as(status, None)
}

/// A refusal by the service with a substatus.
pub(super) fn refuse_as(status: u16, substatus: impl Into<Option<u32>>) -> WireAction {
    WireAction::Refuse { status, substatus: substatus.into(), retry_after: None }
}
