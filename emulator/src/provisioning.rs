//! Creates containers with the number of physical partitions that the account was built with.
//!
//! The emulator creates every container with four partitions. So this module creates the container directly in the
//! store with the right number of partitions. It then replaces the container over the wire, which sets the other
//! properties.

use azure_core::http::{headers::HeaderName, Method};
use azure_data_cosmos_driver::in_memory_emulator::{ContainerConfig, EmulatorStore};
use azure_data_cosmos_driver::models::PartitionKeyDefinition;
use serde_json::Value;

use crate::answer::{Answer, NoAnswer};
use crate::request::{encode, is_true, Outgoing};
use crate::service::Service;

const THROUGHPUT: HeaderName = HeaderName::from_static("x-ms-offer-throughput");
const IS_QUERY: HeaderName = HeaderName::from_static("x-ms-documentdb-isquery");

/// The number of partitions and the throughput of new containers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Provisioning {
    pub partitions: u32,
    pub throughput: Option<u64>,
}

/// A container to create in the store.
struct ContainerPlan {
    database: String,
    container: String,
    partition_key: PartitionKeyDefinition,
    config: ContainerConfig,
}

/// Answers a request about databases or containers. The caller sends one request at a time.
pub(crate) async fn answer(
    service: &Service,
    provisioning: Provisioning,
    request: &Outgoing,
) -> Result<Answer, NoAnswer> {
    match plan(service.store(), provisioning, request) {
        Some(plan) if is_name_free(service, request, &plan).await? => create(service, request, plan).await,
        _ => service.forward(request).await,
    }
}

/// Returns the container to create. Returns `None` if the emulator has to answer the request, for example to refuse it.
fn plan(store: &EmulatorStore, provisioning: Provisioning, request: &Outgoing) -> Option<ContainerPlan> {
    let segments = request.segments();
    let [dbs, database, colls] = segments.as_slice() else {
        return None;
    };
    let is_create = request.method == Method::Post
        && !is_true(&request.headers, &IS_QUERY)
        && (dbs.as_str(), colls.as_str()) == ("dbs", "colls");
    let region = store.config().region_for_url(&request.url)?;
    if !is_create || !store.config().is_write_region(&region.name) {
        return None;
    }
    let body: Value = serde_json::from_slice(&request.body).ok()?;
    // Unique keys can't be added to an existing container. So a container with unique keys has the emulator's four
    // partitions.
    if body.get("uniqueKeyPolicy").is_some_and(has_unique_keys) {
        return None;
    }
    Some(ContainerPlan {
        database: database.clone(),
        container: body.get("id")?.as_str()?.to_owned(),
        partition_key: serde_json::from_value(body.get("partitionKey")?.clone()).ok()?,
        config: config(provisioning, request)?,
    })
}

fn has_unique_keys(policy: &Value) -> bool {
    let keys = policy.get("uniqueKeys").and_then(Value::as_array);
    keys.is_some_and(|keys| !keys.is_empty())
}

fn config(provisioning: Provisioning, request: &Outgoing) -> Option<ContainerConfig> {
    let requested = request.headers.get_optional_str(&THROUGHPUT);
    let throughput = requested.and_then(|text| text.trim().parse().ok()).or(provisioning.throughput);
    let mut config = ContainerConfig::new().with_partition_count(provisioning.partitions);
    if let Some(throughput) = throughput {
        config = config.with_throughput(throughput);
    }
    config.build().ok()
}

/// Whether the database exists and the container does not.
async fn is_name_free(service: &Service, request: &Outgoing, plan: &ContainerPlan) -> Result<bool, NoAnswer> {
    let database = service.forward(&request.get(&format!("/dbs/{}", encode(&plan.database)))).await?;
    let container = service.forward(&request.get(&path_of(plan))).await?;
    Ok(database.is_success() && container.status == 404)
}

async fn create(service: &Service, request: &Outgoing, plan: ContainerPlan) -> Result<Answer, NoAnswer> {
    let mut replace = request.clone();
    replace.method = Method::Put;
    replace.url.set_path(&path_of(&plan));
    service.store().create_container_with_config(&plan.database, &plan.container, plan.partition_key, plan.config);
    let mut answer = service.forward(&replace).await?;
    if answer.status == 200 {
        answer.status = 201;
    }
    Ok(answer)
}

fn path_of(plan: &ContainerPlan) -> String {
    format!("/dbs/{}/colls/{}", encode(&plan.database), encode(&plan.container))
}
