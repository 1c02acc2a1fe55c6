//! What page and tool both show of an instance.

use duroxide::{Client, OrchestrationStatus};
use duroxide_cosmos::{operate::InstanceSummary, CosmosDBProvider};
use futures::{stream, StreamExt, TryStreamExt};

/// Why something can't be shown.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// An instance and what descends from it, the first `most` of them.
pub async fn family(
    provider: &CosmosDBProvider,
    client: &Client,
    id: &str,
    most: usize,
) -> Result<Vec<InstanceSummary>, Error> {
    const AT_ONCE: usize = 16;
    let ids = client.get_instance_tree(id).await?.all_ids;
    let reading = stream::iter(ids.into_iter().take(most)).map(|id| async move { provider.instance(&id).await });
    let members: Vec<Option<InstanceSummary>> = reading.buffered(AT_ONCE).try_collect().await?;
    Ok(members.into_iter().flatten().collect())
}

/// The result of an instance that has ended, or why it failed, and its custom status.
pub fn told_by(status: &OrchestrationStatus) -> (Option<String>, Option<String>) {
    match status {
        OrchestrationStatus::NotFound => (None, None),
        OrchestrationStatus::Running { custom_status, .. } => (None, custom_status.clone()),
        OrchestrationStatus::Completed { output, custom_status, .. } => (Some(output.clone()), custom_status.clone()),
        OrchestrationStatus::Failed { details, custom_status, .. } => {
            (Some(details.display_message()), custom_status.clone())
        }
    }
}
