//! Reads of an instance that the dashboard and the CLI share.

use duroxide::{Client, OrchestrationStatus};
use duroxide_cosmos::{operate::InstanceSummary, CosmosDBProvider};
use futures::{stream, StreamExt, TryStreamExt};

/// The error of a read.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// The first `limit` instances of a tree: an instance with its descendants.
pub async fn instance_tree(
    provider: &CosmosDBProvider,
    client: &Client,
    id: &str,
    limit: usize,
) -> Result<Vec<InstanceSummary>, Error> {
    const CONCURRENCY: usize = 16;
    let ids = client.get_instance_tree(id).await?.all_ids;
    let reads = stream::iter(ids.into_iter().take(limit)).map(|id| async move { provider.instance(&id).await });
    let instances: Vec<Option<InstanceSummary>> = reads.buffered(CONCURRENCY).try_collect().await?;
    Ok(instances.into_iter().flatten().collect())
}

/// The result and the custom status of an instance. The result of a failed instance is its error.
pub fn result_and_custom_status(status: &OrchestrationStatus) -> (Option<String>, Option<String>) {
    match status {
        OrchestrationStatus::NotFound => (None, None),
        OrchestrationStatus::Running { custom_status, .. } => (None, custom_status.clone()),
        OrchestrationStatus::Completed { output, custom_status, .. } => (Some(output.clone()), custom_status.clone()),
        OrchestrationStatus::Failed { details, custom_status, .. } => {
            (Some(details.display_message()), custom_status.clone())
        }
    }
}
