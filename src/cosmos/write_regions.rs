//! Whether the account has one write region.
//!
//! With several, conflicting writes are merged after the fact: ETags protect nothing, and two workers could commit the same
//! turn. The SDK reads that setting for itself and shows it to nobody; what it shows of every answer is the region that
//! gave it. So the account is asked where writes go, with a batch of one read, which changes nothing; and then where they
//! go if not there. With one write region that is the same one: nothing else takes a batch.
//!
//! What this can't see: an account that allows several write regions but has only one region yet, and one that is changed
//! while the process runs.

use super::{bootstrap::Opening, error::StoreError};
use crate::model::Partition;
use azure_data_cosmos::{
    models::BatchResponse,
    options::{BatchOptions, ExcludedRegions, OperationOptionsBuilder, Region},
    ContainerClient, CosmosError, TransactionalBatch,
};

/// Substatus of a write that no region took, which the SDK gives once it has asked those that are left.
const WRITE_FORBIDDEN: u16 = 20_311;

/// Two regions that both take writes, if there are.
pub(super) async fn several(
    opening: &Opening<'_>,
    container: &ContainerClient,
) -> Result<Option<(Region, Region)>, StoreError> {
    let Some(home) = writes_go_to(opening, container, None).await? else { return Ok(None) };
    let Some(other) = writes_go_to(opening, container, Some(&home)).await?.filter(|other| *other != home) else {
        return Ok(None);
    };
    // The write region may have moved just now: then the first one takes no writes any more.
    let again = writes_go_to(opening, container, Some(&other)).await?;
    Ok((again.as_ref() == Some(&home)).then_some((home, other)))
}

/// The region that takes a batch, another one than `avoided` where there is one.
async fn writes_go_to(
    opening: &Opening<'_>,
    container: &ContainerClient,
    avoided: Option<&Region>,
) -> Result<Option<Region>, StoreError> {
    let asked = opening.ride_out_present(|| {
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
    asked.await
}

/// The region of the last request: those before it were turned away.
fn answered_by(answer: &BatchResponse) -> Option<Region> {
    answer.diagnostics().requests().last().and_then(|request| request.region().cloned())
}

fn is_write_forbidden(error: &CosmosError) -> bool {
    error.status().sub_status().is_some_and(|substatus| substatus.value() == WRITE_FORBIDDEN)
}
