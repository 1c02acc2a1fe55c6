//! Accounts for the validation suite: an empty one for every provider, and the hooks that look behind the provider.

use async_trait::async_trait;
use azure_data_cosmos::{ContainerClient, CosmosClient, FeedScope, Query};
use duroxide::{
    provider_validation::ProviderFactory,
    providers::{Provider, TagFilter},
};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use futures::TryStreamExt;
use serde_json::Value;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

/// How the account is reached.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code)]
pub enum Account {
    /// In process, with so many physical partitions.
    InProcess(u32),
    /// Over HTTP on loopback, with so many physical partitions.
    Served(u32),
}

/// Makes providers, each on an account of its own, and remembers the last.
pub struct Backend {
    account: Account,
    last: Mutex<Option<Made>>,
}

struct Made {
    account: LocalAccount,
    /// Kept so that the account stays reachable.
    _served: Option<Served>,
    provider: Arc<CosmosDBProvider>,
}

impl Backend {
    pub fn new(account: Account) -> Self {
        Self { account, last: Mutex::new(None) }
    }

    async fn made(&self) -> Made {
        match self.account {
            Account::InProcess(partitions) => {
                let account = LocalAccount::builder().with_partitions(partitions).build();
                let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
                let client = account.client().await;
                let provider = CosmosDBProvider::new_with_client(&client, config).await.expect("a provider");
                Made { account, _served: None, provider: Arc::new(provider) }
            }
            Account::Served(partitions) => {
                let account = LocalAccount::builder().with_partitions(partitions).build();
                let served = account.serve(([127, 0, 0, 1], 0).into()).await.expect("a port");
                let config = CosmosDBProviderConfig::default()
                    .with_endpoint(served.endpoint())
                    .with_credential(Credential::account_key(account.key().to_owned()));
                let provider = CosmosDBProvider::new_with_config(config).await.expect("a provider");
                Made { account, _served: Some(served), provider: Arc::new(provider) }
            }
        }
    }

    async fn container(&self) -> ContainerClient {
        let account = self.last.lock().unwrap().as_ref().expect("a provider was made").account.clone();
        let client: CosmosClient = account.client_named("hook").await;
        client.database_client("duroxide").container_client("duroxide", None).await.expect("the container")
    }

    async fn documents(&self, instance: &str, kind: &str) -> Vec<Value> {
        let query = Query::from("SELECT * FROM c WHERE c.type = @type").with_parameter("@type", kind).unwrap();
        let scope = FeedScope::partition(instance.to_owned());
        let items = self.container().await.query_items(query, scope, None).await.unwrap();
        items.try_collect().await.unwrap()
    }

    async fn replace(&self, instance: &str, document: &Value) {
        let id = document["id"].as_str().unwrap();
        self.container().await.replace_item(instance.to_owned(), id, document, None).await.unwrap();
    }
}

#[async_trait]
impl ProviderFactory for Backend {
    async fn create_provider(&self) -> Arc<dyn Provider> {
        let made = self.made().await;
        let provider = made.provider.clone();
        *self.last.lock().unwrap() = Some(made);
        // The first requests of a client resolve the account and the container: not part of what a test measures.
        let second = Duration::from_secs(1);
        provider.fetch_orchestration_item(second, Duration::ZERO, None).await.expect("nothing to fetch");
        provider.fetch_work_item(second, Duration::ZERO, None, &TagFilter::Any).await.expect("nothing to fetch");
        provider
    }

    fn lock_timeout(&self) -> Duration {
        Duration::from_secs(2)
    }

    async fn corrupt_instance_history(&self, instance: &str) {
        for mut document in self.documents(instance, "history").await {
            document["events"] = serde_json::json!(["NOT AN EVENT"]);
            self.replace(instance, &document).await;
        }
        // A cache that goes by the instance's ETag must notice, once what it saw just before has become stale.
        for document in self.documents(instance, "instance").await {
            self.replace(instance, &document).await;
        }
        tokio::time::sleep(CosmosDBProviderConfig::default().read_staleness()).await;
    }

    async fn get_max_attempt_count(&self, instance: &str) -> u32 {
        let claims: Vec<u64> = self
            .documents(instance, "instance")
            .await
            .iter()
            .flat_map(|d| d["claims"].as_array().cloned().unwrap_or_default())
            .filter_map(|claim| claim.as_u64())
            .collect();
        let attempts = |message: &Value| {
            let visible = message["due"].as_u64().unwrap().max(message["createdAt"].as_u64().unwrap());
            let seen = claims.iter().filter(|claim| **claim >= visible).count() as u64;
            (message["attempts"].as_u64().unwrap_or(0) + seen) as u32
        };
        self.documents(instance, "message").await.iter().map(attempts).max().unwrap_or(0)
    }
}
