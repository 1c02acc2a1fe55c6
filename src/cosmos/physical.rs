//! Queries of one physical partition at a time, so that the cost of a poll does not depend on their number.
//!
//! A query asks whole physical partitions only. The gateway answers 400 to a range inside a physical partition, so all
//! ranges come from [`Store::physical_partitions`].
//!
//! - After a split, all new partitions of a range answer together.
//! - After a merge, the old range is inside a physical partition. The service answers 400, and the SDK keeps its list.
//!
//! So after a 400 the store fetches the list again. It reports a range that is no longer listed as
//! [`StoreError::PartitionsChanged`].

use super::{
    call::MIN_PAUSE,
    error::{describe, StoreError},
    Deadline, Pages, QueryTimeout, Statement, Store,
};
use azure_data_cosmos::{feed::FeedRange, options::ReadFeedRangesOptions, FeedScope};
use serde::de::DeserializeOwned;

impl Store {
    /// The container's physical partitions, in the order of their hashes.
    ///
    /// The SDK has the list since the container was opened, and replaces it when an answer shows that it is out of
    /// date. So this call usually takes no request.
    pub(crate) async fn physical_partitions(&self, deadline: Deadline) -> Result<Vec<FeedRange>, StoreError> {
        self.list_partitions(ReadFeedRangesOptions::default(), deadline).await
    }

    /// The same list, fetched from the service instead of the SDK's cache.
    pub(super) async fn refresh_partitions(&self, deadline: Deadline) -> Result<Vec<FeedRange>, StoreError> {
        self.list_partitions(ReadFeedRangesOptions::default().with_force_refresh(true), deadline).await
    }

    async fn list_partitions(
        &self,
        options: ReadFeedRangesOptions,
        deadline: Deadline,
    ) -> Result<Vec<FeedRange>, StoreError> {
        let mut pause = MIN_PAUSE;
        loop {
            let listing = self.inner.container.read_feed_ranges(Some(options.clone()));
            let detail = match tokio::time::timeout_at(deadline.instant(), listing).await {
                Ok(Ok(mut ranges)) => {
                    ranges.sort_by(|a, b| a.min_inclusive().cmp(b.min_inclusive()));
                    return Ok(ranges);
                }
                // The SDK reports every failure as a missing list.
                Ok(Err(error)) => describe(&error),
                Err(_) => "the deadline passed while the request was in flight".to_owned(),
            };
            self.pause(&mut pause, None, deadline).await;
            if deadline.passed() {
                return Err(StoreError::Unavailable { detail: format!("list of physical partitions: {detail}") });
            }
        }
    }

    /// Queries the physical partitions in `range`, page by page.
    pub(crate) fn range_pages<T: DeserializeOwned + Send + 'static>(
        &self,
        range: &FeedRange,
        statement: Statement,
        timeout: impl Into<QueryTimeout>,
    ) -> Result<Pages<T>, StoreError> {
        let pages = self.pages_across(FeedScope::range(range.clone()), statement, timeout.into())?;
        Ok(pages.of_range(range))
    }
}
