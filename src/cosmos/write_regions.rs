//! Checks that the account has one write region.
//!
//! With several write regions, the service merges conflicting writes afterwards. Then ETags protect nothing, and two
//! workers could commit the same turn. The SDK reads that setting but does not show it. It does show the region of
//! each answer. So the check sends a batch of one read, which changes nothing and goes to the write region. Then it
//! sends the batch again and excludes that region. With one write region, the same region answers, because no other
//! takes a batch.
//!
//! The check can't detect two cases:
//!
//! - the account allows several write regions but has only one region so far;
//! - the account is changed while the process runs.

use super::{bootstrap::Opening, error::StoreError};
use crate::model::Partition;
use azure_data_cosmos::{
    models::BatchResponse,
    options::{BatchOptions, ExcludedRegions, OperationOptionsBuilder, Region},
    ContainerClient, CosmosError, TransactionalBatch,
};

/// Substatus of a write that no region accepts. The SDK reports it after it has asked all regions that are not
/// excluded.
const WRITE_FORBIDDEN: u16 = 20_311;

/// Two regions that both accept writes, if the account has them.
pub(super) async fn several(
    opening: &Opening<'_>,
    container: &ContainerClient,
) -> Result<Option<(Region, Region)>, StoreError> {
    let Some(home) = writes_go_to(opening, container, None).await? else { return Ok(None) };
    let Some(other) = writes_go_to(opening, container, Some(&home)).await?.filter(|other| *other != home) else {
        return Ok(None);
    };
    // The write region may have moved just now. Then the first one accepts no writes any more.
    let again = writes_go_to(opening, container, Some(&other)).await?;
    Ok((again.as_ref() == Some(&home)).then_some((home, other)))
}

/// The region that accepts a batch. If possible, another one than `avoided`.
async fn writes_go_to(
    opening: &Opening<'_>,
    container: &ContainerClient,
    avoided: Option<&Region>,
) -> Result<Option<Region>, StoreError> {
    let answered = opening.with_retries_until_visible(|| {
        let excluded =
            avoided.map_or_else(ExcludedRegions::new, |region| ExcludedRegions::new().with_region(region.clone()));
        let options = OperationOptionsBuilder::new().with_excluded_regions(excluded).build();
        let options = BatchOptions::default().with_operation_options(options);
        let nothing = TransactionalBatch::new(&Partition::system("any")).read_item("any", None);
        Box::pin(async move {
            match container.execute_transactional_batch(nothing, Some(options)).await {
                Ok(answer) => Ok(answered_by(&answer)),
                Err(error) if is_write_forbidden(&error) => Ok(None),
                Err(error) => Err(error),
            }
        })
    });
    answered.await
}

/// The region of the last request. Other regions refused the requests before it.
fn answered_by(answer: &BatchResponse) -> Option<Region> {
    answer.diagnostics().requests().last().and_then(|request| request.region().cloned())
}

fn is_write_forbidden(error: &CosmosError) -> bool {
    error.status().sub_status().is_some_and(|substatus| substatus.value() == WRITE_FORBIDDEN)
}
