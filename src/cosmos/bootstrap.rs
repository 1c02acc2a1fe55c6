//! Opens the container: creates it if the configuration allows that, then checks its properties and its format.
//!
//! - The provider checks the properties before it writes any document. Then it checks the format, and last the batches.
//! - Two processes may start at once. A 409 then means that the other one was faster.
//! - Entra ID can create neither databases nor containers on the data plane. Then the container must exist.
//! - An error about the container includes the command that repairs it.

use super::{
    call::{MAX_PAUSE, MIN_PAUSE},
    check::CheckLine,
    error::{classify, describe, is_token_missing, ErrorClass, StoreError},
    format, indexing, probe, write_regions, ContainerLocation, Deadline, Store,
};
use crate::{
    config::{CosmosDBProviderConfig, Throughput},
    credential::TokenCache,
};
use azure_data_cosmos::{
    models::{ContainerProperties, PartitionKeyDefinition, PartitionKeyVersion, ThroughputProperties, TimeToLive},
    options::CreateContainerOptions,
    ContainerClient, CosmosClient, CosmosError,
};
use futures::future::BoxFuture;
use std::{future::Future, time::Duration};
use tracing::{info, warn};

/// The path of the partition key. It can't be changed after the container is created.
const PARTITION_KEY_PATH: &str = "/instanceId";

/// The time limit for opening. Creating a container may take a while.
const TIME: Duration = Duration::from_secs(60);

/// The time limit for reading the throughput, which only a message needs.
const THROUGHPUT_TIME: Duration = Duration::from_secs(5);
/// The throughput in RU/s that a provisioned account gives to a container that is created without one.
const DEFAULT_THROUGHPUT: u64 = 400;
/// The RU of a small orchestration: an estimate from published prices, not measured on Azure.
const SMALL_ORCHESTRATION_RU: u64 = 65;
/// Advice beside the command that creates a container. The command has no throughput, because serverless accounts
/// refuse the option.
pub(super) const THROUGHPUT_ADVICE: &str =
    "unless the account is serverless, add --max-throughput 4000: the default is \
     400 RU/s, about six small orchestrations a second";

/// Opens the container. Creates it first if it is missing and `config` allows that.
pub(crate) async fn open(
    client: &CosmosClient,
    config: &CosmosDBProviderConfig,
    tokens: Option<TokenCache>,
) -> Result<Store, StoreError> {
    let opening = Opening::new(client.endpoint().host_str(), config, TIME).with_tokens(tokens);
    let container = match opening.find(client).await? {
        Some(container) => container,
        None if config.create_if_missing() => opening.create(client).await?,
        None => return Err(opening.location.missing()),
    };
    opening.check(&container).await?;
    // A separate store, so that the statistics leave out the requests of opening.
    let store = opening.store(container.clone());
    opening.until_visible(|| format::ensure(&store, opening.deadline)).await?;
    opening.check_batches(&store).await?;
    Ok(opening.store(container))
}

/// The account, database and container to open, and the time limit.
pub(super) struct Opening<'a> {
    config: &'a CosmosDBProviderConfig,
    location: ContainerLocation,
    time: Duration,
    deadline: Deadline,
    tokens: Option<TokenCache>,
}

/// An existing container and its properties.
pub(super) struct ContainerState {
    pub(super) container: ContainerClient,
    pub(super) properties: ContainerProperties,
}

/// The answer to a request of opening. Every other answer is an error.
pub(super) enum Setup<T> {
    Done(T),
    NotFound,
    Conflict,
}

impl<'a> Opening<'a> {
    pub(super) fn new(host: Option<&str>, config: &'a CosmosDBProviderConfig, time: Duration) -> Self {
        let location = ContainerLocation {
            account: host.unwrap_or("the account").to_owned(),
            database: config.database().to_owned(),
            container: config.container().to_owned(),
            credential: config.credential_kind(),
        };
        Self { config, location, time, deadline: Deadline::after(time), tokens: None }
    }

    /// Adds the token cache of the client, so that a token that the service refuses can be replaced.
    pub(super) fn with_tokens(self, tokens: Option<TokenCache>) -> Self {
        Self { tokens, ..self }
    }

    async fn find(&self, client: &CosmosClient) -> Result<Option<ContainerClient>, StoreError> {
        let database = client.database_client(self.location.database.clone());
        let name = self.location.container.clone();
        let found = self.with_retries(|| Box::pin(database.container_client(name.clone(), None))).await?;
        match found {
            Setup::Done(container) => Ok(Some(container)),
            Setup::NotFound | Setup::Conflict => Ok(None),
        }
    }

    async fn create(&self, client: &CosmosClient) -> Result<ContainerClient, StoreError> {
        let ContainerLocation { database, container, .. } = &self.location;
        info!(database, container, "creating the container, and the database if it is missing");
        self.with_retries(|| Box::pin(client.create_database(database, None))).await?;
        let parent = client.database_client(database.clone());
        let created = self
            .with_retries(|| {
                let options = creation_options(self.config.throughput());
                Box::pin(parent.create_container(container_properties(container), Some(options)))
            })
            .await?;
        if let Setup::NotFound = created {
            return Err(self.location.missing());
        }
        // Another process may have created it. A new container may take a moment to become visible.
        let visible = || async { self.find(client).await?.ok_or_else(|| self.location.missing()) };
        let found = self.until_visible(visible).await?;
        if let CheckLine::Warning(remark) = self.throughput(&found).await {
            warn!(database, container, "the new container has {remark}");
        }
        Ok(found)
    }

    async fn check(&self, container: &ContainerClient) -> Result<(), StoreError> {
        let properties = self.properties(container).await?;
        self.check_partition_key(&properties.partition_key)?;
        self.check_index(&properties)?;
        if let Some(remark) = self.check_time_to_live(&properties.default_ttl)? {
            warn!(container = self.location.container, "{remark}");
        }
        self.check_write_regions(container).await
    }

    pub(super) fn store(&self, container: ContainerClient) -> Store {
        Store::new(container, self.location.clone(), self.config, self.tokens.clone())
    }

    async fn properties(&self, container: &ContainerClient) -> Result<ContainerProperties, StoreError> {
        let response = self.with_retries_until_visible(|| Box::pin(container.read(None))).await?;
        response
            .into_model()
            .map_err(|e| StoreError::Malformed { detail: format!("the container's properties: {}", describe(&e)) })
    }

    /// The existing container and its properties. Creates nothing.
    pub(super) async fn inspect(&self, client: &CosmosClient) -> Result<ContainerState, StoreError> {
        let container = self.find(client).await?.ok_or_else(|| self.location.missing())?;
        let properties = self.properties(&container).await?;
        Ok(ContainerState { container, properties })
    }

    pub(super) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Checks the time to live. Returns a warning if it is off.
    pub(super) fn check_time_to_live(&self, default: &TimeToLive) -> Result<Option<String>, StoreError> {
        let command = update_command(&self.location, "--ttl -1");
        match default {
            TimeToLive::Seconds(seconds) => {
                let problem = format!(
                    "its default time to live is {seconds} s, after which Cosmos DB would delete histories and messages"
                );
                Err(self.unfit(problem, format!("Run `{command}`")))
            }
            TimeToLive::Forever => Ok(Some(format!(
                "time to live is off: markers of delivered messages stay for ever, even after their instance is \
                 deleted. Turn it on with: {command}"
            ))),
            _ => Ok(None),
        }
    }

    /// Refuses an account whose batches are not atomic or ignore conditions. Every commit relies on both.
    pub(super) async fn check_batches(&self, store: &Store) -> Result<(), StoreError> {
        let probed = self.until_visible(|| probe::batches(store, self.deadline)).await?;
        let Some(flaw) = probed else { return Ok(()) };
        let problem = format!("{}, so two workers could commit the same turn", flaw.describe());
        let remedy = "Gateway 2.0 and the vNext emulator in Docker are known to do this: connect through the standard \
                      gateway (with_gateway_v2_disabled, for a client of your own), and use the local account of this \
                      project in place of that emulator";
        Err(self.unfit(problem, remedy.to_owned()))
    }

    /// Reads the container's own throughput. Entra ID can't read it.
    pub(super) async fn throughput(&self, container: &ContainerClient) -> CheckLine {
        let found = match tokio::time::timeout(THROUGHPUT_TIME, container.read_throughput(None)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return CheckLine::Unknown(format!("can't be read: {}", describe(&error))),
            Err(_) => return CheckLine::Unknown(format!("can't be read within {THROUGHPUT_TIME:?}")),
        };
        let Some(found) = found else {
            return CheckLine::Ok(
                "none of its own: the account is serverless, or the database shares its throughput".to_owned(),
            );
        };
        match (found.autoscale_maximum(), found.throughput()) {
            (Some(most), _) => CheckLine::Ok(format!("autoscale up to {most} RU/s")),
            (None, Some(ru)) if ru <= DEFAULT_THROUGHPUT => CheckLine::Warning(self.low_throughput(ru)),
            (None, Some(ru)) => CheckLine::Ok(format!("{ru} RU/s")),
            (None, None) => CheckLine::Ok("none of its own".to_owned()),
        }
    }

    /// The warning for a container with the default throughput.
    fn low_throughput(&self, ru: u64) -> String {
        format!(
            "{ru} RU/s, enough for about {} small orchestrations a second (estimate from published prices, not measured \
             on Azure). Raise it with: az cosmosdb sql container throughput update --account-name {} --resource-group \
             <group> --database-name {} --name {} --throughput <RU/s>",
            ru / SMALL_ORCHESTRATION_RU,
            self.location.account_name(),
            self.location.database,
            self.location.container
        )
    }

    pub(super) async fn check_write_regions(&self, container: &ContainerClient) -> Result<(), StoreError> {
        let Some((one, other)) = write_regions::several(self, container).await? else { return Ok(()) };
        let problem = format!(
            "its account accepts writes in several regions ({} and {}), so two workers could commit the same turn",
            one.display_name(),
            other.display_name()
        );
        let remedy = format!(
            "Run `az cosmosdb update --name {} --resource-group <group> --enable-multiple-write-locations false`",
            self.location.account_name()
        );
        Err(self.unfit(problem, remedy))
    }

    fn unfit(&self, problem: String, remedy: String) -> StoreError {
        StoreError::Unfit { container: self.location.container.clone(), problem, remedy }
    }

    pub(super) fn check_partition_key(&self, key: &PartitionKeyDefinition) -> Result<(), StoreError> {
        let paths: Vec<&str> = key.paths().iter().map(AsRef::as_ref).collect();
        let problem = if paths != [PARTITION_KEY_PATH] {
            format!("its partition key is {}, but must be {PARTITION_KEY_PATH}", paths.join(", "))
        } else if key.version() != PartitionKeyVersion::V2 {
            "its partition key is of version 1, which takes values of 101 bytes only; it must be version 2".to_owned()
        } else {
            return Ok(());
        };
        let remedy = format!(
            "A partition key can't be changed: name another container, or delete this one and run `{}` \
             ({THROUGHPUT_ADVICE})",
            create_command(&self.location)
        );
        Err(self.unfit(problem, remedy))
    }

    pub(super) fn check_index(&self, properties: &ContainerProperties) -> Result<(), StoreError> {
        let missing = indexing::missing_paths(properties.indexing_policy.as_ref());
        if missing.is_empty() {
            return Ok(());
        }
        if indexing::is_of_duroxide_cdb(properties.indexing_policy.as_ref()) {
            // With another index the container would hold documents of both providers, and neither can read the
            // other's.
            let problem = "duroxide-cdb created it, and its documents have another format".to_owned();
            return Err(self.unfit(problem, "Name another container: COSMOS_CONTAINER, or with_container".to_owned()));
        }
        let problem = format!("its index does not cover {}", missing.join(", "));
        let remedy = format!("Run `{}`", update_command(&self.location, &format!("--idx '{}'", policy_json())));
        Err(self.unfit(problem, remedy))
    }

    /// Like [`with_retries`](Self::with_retries), for a container that was found. A new container is not known
    /// everywhere for some seconds. So an answer that it is missing counts only after the deadline.
    pub(super) async fn with_retries_until_visible<'x, T>(
        &self,
        attempt: impl Fn() -> BoxFuture<'x, Result<T, CosmosError>>,
    ) -> Result<T, StoreError> {
        let once = || async {
            match self.with_retries(&attempt).await? {
                Setup::Done(value) => Ok(value),
                Setup::NotFound | Setup::Conflict => Err(self.location.missing()),
            }
        };
        self.until_visible(once).await
    }

    /// Repeats a call while the service reports a container as missing that was found before.
    async fn until_visible<T, F: Future<Output = Result<T, StoreError>>>(
        &self,
        mut call: impl FnMut() -> F,
    ) -> Result<T, StoreError> {
        let mut pause = MIN_PAUSE;
        loop {
            match call().await {
                Err(StoreError::Missing { .. }) if !self.deadline.passed() => {
                    tokio::time::sleep(pause.min(self.deadline.remaining())).await;
                    pause = (pause * 2).min(MAX_PAUSE);
                }
                outcome => return outcome,
            }
        }
    }

    /// Repeats an attempt while the service is throttling or unreachable.
    pub(super) async fn with_retries<'x, T>(
        &self,
        mut attempt: impl FnMut() -> BoxFuture<'x, Result<T, CosmosError>>,
    ) -> Result<Setup<T>, StoreError> {
        let mut pause = MIN_PAUSE;
        loop {
            let error = match tokio::time::timeout_at(self.deadline.instant(), attempt()).await {
                Ok(Ok(value)) => return Ok(Setup::Done(value)),
                Ok(Err(error)) => error,
                Err(_) => return Err(StoreError::Unavailable { detail: self.no_answer() }),
            };
            let retry_after = match classify(&error) {
                ErrorClass::Absent | ErrorClass::ContainerMissing => return Ok(Setup::NotFound),
                ErrorClass::Exists => return Ok(Setup::Conflict),
                ErrorClass::Denied => return Err(self.denied(&error)),
                ErrorClass::Retry { .. } if is_token_missing(&error) => return Err(self.no_token(&error)),
                ErrorClass::Retry { after, .. } => after,
                _ => return Err(StoreError::Malformed { detail: self.context(&error) }),
            };
            tokio::time::sleep(retry_after.unwrap_or(pause).min(self.deadline.remaining())).await;
            if self.deadline.passed() {
                return Err(StoreError::Unavailable { detail: self.context(&error) });
            }
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// The error for a denied request. With Entra ID, a refusal to create says nothing about reading and writing
    /// documents.
    fn denied(&self, error: &CosmosError) -> StoreError {
        let forbidden = u16::from(error.status().status_code()) == 403;
        let entra = self.config.credential().is_some_and(|c| !c.is_key());
        if forbidden && entra && self.config.create_if_missing() {
            return StoreError::Denied {
                credential: self.location.credential.clone(),
                detail: describe(error),
                advice: format!(
                    "Entra ID can create neither databases nor containers: run `{}` ({THROUGHPUT_ADVICE}) and set \
                     create_if_missing to false",
                    create_command(&self.location)
                ),
            };
        }
        self.location.denied(error)
    }

    /// The error for a credential that returns no token.
    fn no_token(&self, error: &CosmosError) -> StoreError {
        StoreError::Denied {
            credential: self.location.credential.clone(),
            detail: describe(error),
            advice:
                "The credential returned no token: check COSMOS_CREDENTIAL and the AZURE_* variables, or sign in with \
                     `az login`"
                    .to_owned(),
        }
    }

    /// The detail of a request without an answer. Signing in is part of the request, and may be the slow part.
    fn no_answer(&self) -> String {
        let ContainerLocation { account, credential, .. } = &self.location;
        format!("{account} did not answer, or {credential} did not sign in, within {:?}", self.time)
    }

    fn context(&self, error: &CosmosError) -> String {
        if error.is_from_wire() {
            return format!("{} answered {}", self.location.account, describe(error));
        }
        format!("{} could not be reached: {}", self.location.account, describe(error))
    }
}

/// The properties of a container that the provider creates.
pub(crate) fn container_properties(name: &str) -> ContainerProperties {
    let key = PartitionKeyDefinition::from(PARTITION_KEY_PATH).with_version(PartitionKeyVersion::V2);
    ContainerProperties::new(name.to_owned(), key)
        .with_indexing_policy(indexing::policy())
        // No default, but a document may set its own: the markers of delivered messages do.
        .with_default_ttl(TimeToLive::NoDefault)
}

fn creation_options(throughput: Throughput) -> CreateContainerOptions {
    let options = CreateContainerOptions::default();
    match throughput {
        Throughput::ServerlessOrShared => options,
        Throughput::Manual(ru) => options.with_throughput(ThroughputProperties::manual(ru)),
        Throughput::Autoscale(max) => options.with_throughput(ThroughputProperties::autoscale(max, None)),
    }
}

/// The indexing policy as JSON, as `az` expects it.
pub(super) fn policy_json() -> String {
    // A policy consists of strings and lists of strings, which always serialise.
    serde_json::to_string(&indexing::policy()).unwrap_or_default()
}

/// The command that creates the container, with its index.
pub(super) fn create_command(location: &ContainerLocation) -> String {
    format!(
        "az cosmosdb sql container create --account-name {} --resource-group <group> --database-name {} --name {} \
         --partition-key-path {PARTITION_KEY_PATH} --partition-key-version 2 --ttl -1 --idx '{}'",
        location.account_name(),
        location.database,
        location.container,
        policy_json()
    )
}

fn update_command(location: &ContainerLocation, change: &str) -> String {
    format!(
        "az cosmosdb sql container update --account-name {} --resource-group <group> --database-name {} --name {} \
         {change}",
        location.account_name(),
        location.database,
        location.container
    )
}
