//! Signs in with Entra ID. The command line selects the kind of credential.
//!
//! ```text
//! cargo run --example entra_id                                        # a local account, with a custom token
//!
//! export COSMOS_ENDPOINT=https://<account>.documents.azure.com/
//! az login && cargo run --example entra_id -- developer-tools         # a developer, on a local machine
//! cargo run --example entra_id -- managed-identity                    # the identity of the host, in Azure
//! cargo run --example entra_id -- managed-identity --client-id <id>   # a user-assigned identity
//! cargo run --example entra_id -- workload-identity                   # the identity of a pod, in Kubernetes
//! AZURE_CLIENT_SECRET=... cargo run --example entra_id -- client-secret --tenant-id <id> --client-id <id>
//! cargo run --example entra_id -- azure-cli                           # any credential of azure_identity
//! ```
//!
//! The identity needs the role Cosmos DB Built-in Data Contributor on the account. The container must exist, because
//! Entra ID can't create it through the data plane. `examples/azure/` sets up both.

mod common;

use anyhow::{bail, Context};
use azure_core::{
    credentials::{AccessToken, Secret, TokenCredential, TokenRequestOptions},
    time::OffsetDateTime,
};
use clap::{Parser, Subcommand};
use common::workflows;
use duroxide::{runtime::Runtime, Client};
use duroxide_cosmos::{CosmosDBProvider, CosmosDBProviderConfig, Credential, WorkloadIdentity};
use duroxide_cosmos_emulator::{LocalAccount, Served};
use std::{net::Ipv4Addr, process::ExitCode, sync::Arc, time::Duration};

/// Signs in with Entra ID and runs an orchestration.
#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    kind: Option<Kind>,
}

#[derive(Subcommand)]
enum Kind {
    /// An account in this process, with a custom token credential (the default)
    Local,
    /// The user who has signed in with `az login` or `azd auth login`
    DeveloperTools,
    /// The managed identity of the virtual machine, App Service or Container App
    ManagedIdentity {
        /// The client id of a user-assigned identity
        #[arg(long)]
        client_id: Option<String>,
    },
    /// The federated identity of a Kubernetes service account
    WorkloadIdentity {
        /// Instead of AZURE_CLIENT_ID
        #[arg(long)]
        client_id: Option<String>,
        /// Instead of AZURE_TENANT_ID
        #[arg(long)]
        tenant_id: Option<String>,
    },
    /// A service principal. AZURE_CLIENT_SECRET contains the secret
    ClientSecret {
        #[arg(long, env = "AZURE_TENANT_ID")]
        tenant_id: String,
        #[arg(long, env = "AZURE_CLIENT_ID")]
        client_id: String,
    },
    /// The Azure CLI alone, as an example of any credential of azure_identity
    AzureCli,
}

#[tokio::main]
async fn main() -> ExitCode {
    common::exit(run(Options::parse().kind.unwrap_or(Kind::Local)).await)
}

async fn run(kind: Kind) -> anyhow::Result<()> {
    common::init_logging("warn,duroxide_cosmos=info");
    if let Kind::Local = kind {
        let served = prepared_account().await?;
        let config = CosmosDBProviderConfig::default().with_endpoint(served.endpoint());
        return greet(config, Credential::Token(Arc::new(MyTokens))).await;
    }
    let endpoint = std::env::var("COSMOS_ENDPOINT").ok().filter(|value| !value.trim().is_empty());
    let Some(endpoint) = endpoint else {
        bail!(
            "set COSMOS_ENDPOINT to https://<account>.documents.azure.com/, \
             or leave the credential out to use a local account"
        );
    };
    let mut config = CosmosDBProviderConfig::default().with_endpoint(endpoint);
    if let Ok(database) = std::env::var("COSMOS_DATABASE") {
        config = config.with_database(database);
    }
    if let Ok(container) = std::env::var("COSMOS_CONTAINER") {
        config = config.with_container(container);
    }
    greet(config, credential(kind)?).await
}

fn credential(kind: Kind) -> anyhow::Result<Credential> {
    Ok(match kind {
        Kind::Local => Credential::Token(Arc::new(MyTokens)),
        Kind::DeveloperTools => Credential::developer_tools(),
        Kind::ManagedIdentity { client_id: None } => Credential::managed_identity(),
        Kind::ManagedIdentity { client_id: Some(id) } => Credential::user_assigned_identity(id),
        Kind::WorkloadIdentity { client_id, tenant_id } => {
            // The environment of the pod sets the ids that are `None`.
            let mut identity = WorkloadIdentity::default();
            identity.client_id = client_id;
            identity.tenant_id = tenant_id;
            Credential::WorkloadIdentity(identity)
        }
        Kind::ClientSecret { tenant_id, client_id } => {
            let secret = std::env::var("AZURE_CLIENT_SECRET").context("set AZURE_CLIENT_SECRET to the secret")?;
            Credential::client_secret(tenant_id, client_id, secret)
        }
        Kind::AzureCli => {
            let cli: Arc<dyn TokenCredential> = azure_identity::AzureCliCredential::new(None)?;
            Credential::from(cli)
        }
    })
}

async fn greet(config: CosmosDBProviderConfig, credential: Credential) -> anyhow::Result<()> {
    println!("Signing in with: {}.", credential.kind());
    let provider = common::open_with(config.with_credential(credential)).await?;
    let runtime =
        Runtime::start_with_store(provider.clone(), workflows::activities(), workflows::orchestrations()).await;
    let client = Client::new(provider.clone());
    let instance = common::unique("entra");
    client.start_orchestration(&instance, "Greeting", "Entra ID").await?;
    println!("{instance}: {}", common::output(&client, &instance, Duration::from_secs(30)).await?);
    runtime.shutdown(None).await;
    provider.shutdown().await;
    Ok(())
}

/// An account on loopback that accepts one bearer token. An operator has created its container with the key.
async fn prepared_account() -> anyhow::Result<Served> {
    let account = LocalAccount::new();
    let config = CosmosDBProviderConfig::default().with_create_if_missing(true);
    CosmosDBProvider::new_with_client(&account.client_named("operator").await, config).await?;
    account.accept_token(MyTokens::TOKEN);
    Ok(account.serve((Ipv4Addr::LOCALHOST, 0).into()).await?)
}

/// A custom token credential. It always returns the same token.
#[derive(Debug)]
struct MyTokens;

impl MyTokens {
    const TOKEN: &'static str = "a-token-that-only-the-local-account-accepts";
}

#[async_trait::async_trait]
impl TokenCredential for MyTokens {
    async fn get_token(&self, _: &[&str], _: Option<TokenRequestOptions<'_>>) -> azure_core::Result<AccessToken> {
        let in_an_hour = OffsetDateTime::now_utc() + Duration::from_secs(3_600);
        Ok(AccessToken::new(Secret::new(Self::TOKEN), in_an_hour))
    }
}
