//! Accounts for the validation suite: an empty one for each provider, and hooks that change its documents directly.

use crate::{fixture::log, suite::hooks};
use async_trait::async_trait;
use azure_data_cosmos::{ContainerClient, CosmosClient};
use duroxide::{provider_validation::ProviderFactory, providers::Provider};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

/// How the account is reached.
#[derive(Clone, Copy, Debug)]
pub enum Account {
    /// In process, with so many physical partitions.
    InProcess(u32),
    /// The same without inline claims.
    WithoutInlineClaims(u32),
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
    /// Held so that the account stays reachable.
    _served: Option<Served>,
    provider: Arc<CosmosDBProvider>,
}

impl Backend {
    pub fn new(account: Account) -> Self {
        Self { account, last: Mutex::new(None) }
    }

    async fn made(&self) -> Made {
        log::capture();
        match self.account {
            Account::InProcess(partitions) | Account::WithoutInlineClaims(partitions) => {
                let account = LocalAccount::builder().with_partitions(partitions).build();
                let inline_claims = !matches!(self.account, Account::WithoutInlineClaims(_));
                let config =
                    CosmosDBProviderConfig::default().with_create_if_missing(true).with_inline_claims(inline_claims);
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
}

#[async_trait]
impl ProviderFactory for Backend {
    async fn create_provider(&self) -> Arc<dyn Provider> {
        let made = self.made().await;
        let provider = made.provider.clone();
        *self.last.lock().unwrap() = Some(made);
        hooks::warm_up(&*provider).await;
        provider
    }

    fn lock_timeout(&self) -> Duration {
        Duration::from_secs(2)
    }

    async fn corrupt_instance_history(&self, instance: &str) {
        hooks::corrupt_history(&self.container().await, instance).await;
    }

    async fn get_max_attempt_count(&self, instance: &str) -> u32 {
        hooks::max_attempts(&self.container().await, instance).await
    }
}
