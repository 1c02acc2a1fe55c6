//! The container: made where that is allowed, and checked before anything is written to it, the format of its documents last.
//!
//! Two processes may start at once: a 409 means that the other one was faster. With Entra ID the data plane can create
//! neither databases nor containers, so the container must be there, and what is wrong with it is said with the command
//! that mends it.

use super::{
    check::CheckLine,
    error::{classify, describe, is_token_missing, ErrorClass, StoreError},
    format, indexing, probe, write_regions, ContainerLocation, Deadline, Store, MAX_PAUSE, MIN_PAUSE,
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

/// The path of the partition key, which can't be changed once a container is there.
pub(crate) const PARTITION_KEY_PATH: &str = "/instanceId";

/// A new container may take a while.
const TIME: Duration = Duration::from_secs(60);

/// Nobody waits for a figure for long.
const THROUGHPUT_TIME: Duration = Duration::from_secs(5);
/// What a container gets that is created without throughput on a provisioned account.
const LITTLE_THROUGHPUT: u64 = 400;
/// What a small orchestration costs, by the published prices.
const SMALL_ORCHESTRATION: u64 = 65;
/// Beside the command that creates a container, since serverless accounts refuse the option.
pub(super) const THROUGHPUT_ADVICE: &str =
    "unless the account is serverless, add --max-throughput 4000: the default is \
     400 RU/s, about six small orchestrations a second";

/// Opens the container, making it first where `config` allows that.
pub(crate) async fn open(
    client: &CosmosClient,
    config: &CosmosDBProviderConfig,
    tokens: Option<TokenCache>,
) -> Result<Store, StoreError> {
    let opening = Opening::new(client.endpoint().host_str(), config, TIME).with_tokens(tokens);
    let container = match opening.find(client).await? {
        Some(container) => container,
        None if config.create_if_missing() => opening.create(client).await?,
        None => return Err(opening.place.missing()),
    };
    opening.check(&container).await?;
    // With a store of its own: what opening takes is not in the statistics.
    let store = opening.store(container.clone());
    opening.once_present(|| format::agree(&store, opening.deadline)).await?;
    opening.check_batches(&store).await?;
    Ok(opening.store(container))
}

/// The account, database and container that are being opened, and how long that may take.
pub(super) struct Opening<'a> {
    config: &'a CosmosDBProviderConfig,
    place: ContainerLocation,
    time: Duration,
    deadline: Deadline,
    tokens: Option<TokenCache>,
}

/// A container that is there, and how it is set up.
pub(super) struct ContainerState {
    pub(super) container: ContainerClient,
    pub(super) properties: ContainerProperties,
}

/// The codes that setting up tells apart; the rest is an error.
pub(super) enum Setup<T> {
    Done(T),
    NotFound,
    Conflict,
}

impl<'a> Opening<'a> {
    pub(super) fn new(host: Option<&str>, config: &'a CosmosDBProviderConfig, time: Duration) -> Self {
        let place = ContainerLocation {
            account: host.unwrap_or("the account").to_owned(),
            database: config.database().to_owned(),
            container: config.container().to_owned(),
            credential: config.credential_kind(),
        };
        Self { config, place, time, deadline: Deadline::after(time), tokens: None }
    }

    /// With the tokens of the client, so that one that is refused can be replaced.
    pub(super) fn with_tokens(self, tokens: Option<TokenCache>) -> Self {
        Self { tokens, ..self }
    }

    async fn find(&self, client: &CosmosClient) -> Result<Option<ContainerClient>, StoreError> {
        let database = client.database_client(self.place.database.clone());
        let name = self.place.container.clone();
        let found = self.ride_out(|| Box::pin(database.container_client(name.clone(), None))).await?;
        match found {
            Setup::Done(container) => Ok(Some(container)),
            Setup::NotFound | Setup::Conflict => Ok(None),
        }
    }

    async fn create(&self, client: &CosmosClient) -> Result<ContainerClient, StoreError> {
        let ContainerLocation { database, container, .. } = &self.place;
        info!(database, container, "creating the container, and the database where it is missing");
        self.ride_out(|| Box::pin(client.create_database(database, None))).await?;
        let parent = client.database_client(database.clone());
        let made = self
            .ride_out(|| {
                let options = creation_options(self.config.throughput());
                Box::pin(parent.create_container(properties(container), Some(options)))
            })
            .await?;
        if let Setup::NotFound = made {
            return Err(self.place.missing());
        }
        // Another process may have made it, and a container that was just made may take a moment to be seen.
        let seen = || async { self.find(client).await?.ok_or_else(|| self.place.missing()) };
        let found = self.once_present(seen).await?;
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
            warn!(container = self.place.container, "{remark}");
        }
        self.check_write_regions(container).await
    }

    pub(super) fn store(&self, container: ContainerClient) -> Store {
        Store::new(container, self.place.clone(), self.config, self.tokens.clone())
    }

    async fn properties(&self, container: &ContainerClient) -> Result<ContainerProperties, StoreError> {
        let response = self.ride_out_present(|| Box::pin(container.read(None))).await?;
        response
            .into_model()
            .map_err(|e| StoreError::Malformed { detail: format!("the container's properties: {}", describe(&e)) })
    }

    /// The container as it is; none is made.
    pub(super) async fn inspect(&self, client: &CosmosClient) -> Result<ContainerState, StoreError> {
        let container = self.find(client).await?.ok_or_else(|| self.place.missing())?;
        let properties = self.properties(&container).await?;
        Ok(ContainerState { container, properties })
    }

    pub(super) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// What is wrong with the time to live, or what it costs.
    pub(super) fn check_time_to_live(&self, default: &TimeToLive) -> Result<Option<String>, StoreError> {
        let off = update_command(&self.place, "--ttl -1");
        match default {
            TimeToLive::Seconds(seconds) => {
                let problem = format!(
                    "its default time to live is {seconds} s, after which histories and messages would be gone"
                );
                Err(self.unfit(problem, format!("Run `{off}`")))
            }
            TimeToLive::Forever => Ok(Some(format!(
                "time to live is off: markers of delivered messages stay for ever, also after their instance is deleted. \
                 Turn it on with: {off}"
            ))),
            _ => Ok(None),
        }
    }

    /// Refuses an account whose batches are not what every commit relies on.
    pub(super) async fn check_batches(&self, store: &Store) -> Result<(), StoreError> {
        let probed = self.once_present(|| probe::batches(store, self.deadline)).await?;
        let Some(flaw) = probed else { return Ok(()) };
        let problem = format!("{}, so two workers could commit the same turn", flaw.describe());
        let remedy = "Gateway 2.0 and the vNext emulator in Docker are known to do this: connect through the standard \
                      gateway (with_gateway_v2_disabled, for a client of your own), and use the local account of this \
                      project in place of that emulator";
        Err(self.unfit(problem, remedy.to_owned()))
    }

    /// The container's own throughput. Entra ID can't read it.
    pub(super) async fn throughput(&self, container: &ContainerClient) -> CheckLine {
        let found = match tokio::time::timeout(THROUGHPUT_TIME, container.read_throughput(None)).await {
            Ok(Ok(found)) => found,
            Ok(Err(error)) => return CheckLine::Unknown(format!("it can't be read: {}", describe(&error))),
            Err(_) => return CheckLine::Unknown(format!("it can't be read within {THROUGHPUT_TIME:?}")),
        };
        let Some(found) = found else {
            return CheckLine::Ok(
                "none of its own: the account is serverless, or the database shares its throughput".to_owned(),
            );
        };
        match (found.autoscale_maximum(), found.throughput()) {
            (Some(most), _) => CheckLine::Ok(format!("autoscale up to {most} RU/s")),
            (None, Some(ru)) if ru <= LITTLE_THROUGHPUT => CheckLine::Warning(self.little_throughput(ru)),
            (None, Some(ru)) => CheckLine::Ok(format!("{ru} RU/s")),
            (None, None) => CheckLine::Ok("none of its own".to_owned()),
        }
    }

    fn little_throughput(&self, ru: u64) -> String {
        format!(
            "{ru} RU/s, which is enough for about {} small orchestrations a second. Raise it with: az cosmosdb sql container \
             throughput update --account-name {} --resource-group <group> --database-name {} --name {} --throughput <RU/s>",
            ru / SMALL_ORCHESTRATION,
            self.place.account_name(),
            self.place.database,
            self.place.container
        )
    }

    pub(super) async fn check_write_regions(&self, container: &ContainerClient) -> Result<(), StoreError> {
        let Some((one, other)) = write_regions::several(self, container).await? else { return Ok(()) };
        let problem = format!(
            "its account takes writes in several regions ({} and {}), which keeps no two workers apart",
            one.display_name(),
            other.display_name()
        );
        let remedy = format!(
            "Run `az cosmosdb update --name {} --resource-group <group> --enable-multiple-write-locations false`",
            self.place.account_name()
        );
        Err(self.unfit(problem, remedy))
    }

    fn unfit(&self, problem: String, remedy: String) -> StoreError {
        StoreError::Unfit { container: self.place.container.clone(), problem, remedy }
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
            "A partition key can't be changed: name another container, or delete this one and run `{}` ({THROUGHPUT_ADVICE})",
            create_command(&self.place)
        );
        Err(self.unfit(problem, remedy))
    }

    pub(super) fn check_index(&self, properties: &ContainerProperties) -> Result<(), StoreError> {
        let missing = indexing::missing_paths(properties.indexing_policy.as_ref());
        if missing.is_empty() {
            return Ok(());
        }
        if indexing::is_of_duroxide_cdb(properties.indexing_policy.as_ref()) {
            // Mending its index would mix documents that neither provider understands with the other's.
            let problem = "duroxide-cdb made it, whose documents are different".to_owned();
            return Err(self.unfit(problem, "Name another container: COSMOS_CONTAINER, or with_container".to_owned()));
        }
        let problem = format!("its index does not cover {}", missing.join(", "));
        let remedy = format!("Run `{}`", update_command(&self.place, &format!("--idx '{}'", policy_json())));
        Err(self.unfit(problem, remedy))
    }

    /// Like [`ride_out`](Self::ride_out), for a container that was found. A container that was just created is not known
    /// everywhere for some seconds: until the deadline, an answer that it is missing says nothing.
    pub(super) async fn ride_out_present<'x, T>(
        &self,
        attempt: impl Fn() -> BoxFuture<'x, Result<T, CosmosError>>,
    ) -> Result<T, StoreError> {
        let once = || async {
            match self.ride_out(&attempt).await? {
                Setup::Done(value) => Ok(value),
                Setup::NotFound | Setup::Conflict => Err(self.place.missing()),
            }
        };
        self.once_present(once).await
    }

    /// Repeats a call while a container that was found is said to be missing.
    async fn once_present<T, F: Future<Output = Result<T, StoreError>>>(
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

    /// Repeats an attempt while the service is throttling or away.
    pub(super) async fn ride_out<'x, T>(
        &self,
        mut attempt: impl FnMut() -> BoxFuture<'x, Result<T, CosmosError>>,
    ) -> Result<Setup<T>, StoreError> {
        let mut pause = MIN_PAUSE;
        loop {
            let error = match tokio::time::timeout_at(self.deadline.instant(), attempt()).await {
                Ok(Ok(value)) => return Ok(Setup::Done(value)),
                Ok(Err(error)) => error,
                Err(_) => return Err(StoreError::Unavailable { detail: self.silence() }),
            };
            let asked = match classify(&error) {
                ErrorClass::Absent | ErrorClass::ContainerMissing => return Ok(Setup::NotFound),
                ErrorClass::Exists => return Ok(Setup::Conflict),
                ErrorClass::Denied => return Err(self.denied(&error)),
                ErrorClass::Retry { .. } if is_token_missing(&error) => return Err(self.no_token(&error)),
                ErrorClass::Retry { after, .. } => after,
                _ => return Err(StoreError::Malformed { detail: self.context(&error) }),
            };
            tokio::time::sleep(asked.unwrap_or(pause).min(self.deadline.remaining())).await;
            if self.deadline.passed() {
                return Err(StoreError::Unavailable { detail: self.context(&error) });
            }
            pause = (pause * 2).min(MAX_PAUSE);
        }
    }

    /// With Entra ID a refusal to create says nothing about reading and writing documents.
    fn denied(&self, error: &CosmosError) -> StoreError {
        let forbidden = u16::from(error.status().status_code()) == 403;
        let entra = self.config.credential().is_some_and(|c| !c.is_key());
        if forbidden && entra && self.config.create_if_missing() {
            return StoreError::Denied {
                credential: self.place.credential.clone(),
                detail: describe(error),
                advice: format!(
                    "Entra ID can create neither databases nor containers: run `{}` ({THROUGHPUT_ADVICE}) and set \
                     create_if_missing to false",
                    create_command(&self.place)
                ),
            };
        }
        self.place.denied(error)
    }

    fn no_token(&self, error: &CosmosError) -> StoreError {
        StoreError::Denied {
            credential: self.place.credential.clone(),
            detail: describe(error),
            advice: "The credential gave no token: check COSMOS_CREDENTIAL and the AZURE_* variables, or sign in with \
                     `az login`"
                .to_owned(),
        }
    }

    /// Getting a token is a part of the request, and may have been what took so long.
    fn silence(&self) -> String {
        let ContainerLocation { account, credential, .. } = &self.place;
        format!("{account} did not answer, or {credential} did not sign in, within {:?}", self.time)
    }

    fn context(&self, error: &CosmosError) -> String {
        if error.is_from_wire() {
            return format!("{} answered {}", self.place.account, describe(error));
        }
        format!("{} was not reached: {}", self.place.account, describe(error))
    }
}

/// The properties of a container that we create.
pub(crate) fn properties(name: &str) -> ContainerProperties {
    let key = PartitionKeyDefinition::from(PARTITION_KEY_PATH).with_version(PartitionKeyVersion::V2);
    ContainerProperties::new(name.to_owned(), key)
        .with_indexing_policy(indexing::policy())
        // No default, but documents may carry one: the markers of what was delivered do.
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

/// The indexing policy as `az` filter it.
pub(crate) fn policy_json() -> String {
    // A policy is strings and lists of strings, which always serialise.
    serde_json::to_string(&indexing::policy()).unwrap_or_default()
}

/// The command that creates the container, with its index.
pub(crate) fn create_command(place: &ContainerLocation) -> String {
    format!(
        "az cosmosdb sql container create --account-name {} --resource-group <group> --database-name {} --name {} \
         --partition-key-path {PARTITION_KEY_PATH} --partition-key-version 2 --ttl -1 --idx '{}'",
        place.account_name(),
        place.database,
        place.container,
        policy_json()
    )
}

fn update_command(place: &ContainerLocation, change: &str) -> String {
    format!(
        "az cosmosdb sql container update --account-name {} --resource-group <group> --database-name {} --name {} {change}",
        place.account_name(),
        place.database,
        place.container
    )
}
