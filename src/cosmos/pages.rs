//! Queries, page by page.
//!
//! The store repeats only the page that failed. So it can read a long history under throttling, as long as each page
//! succeeds once. After a failed page the SDK's iterator returns nothing more. The query continues in a new iterator,
//! from the SDK's continuation token after the last page.

use super::{
    call::{Call, CallOutcome, Response, MIN_PAUSE},
    error::StoreError,
    regions::Origin,
    rows::Rows,
    Deadline, OperationKind, Statement, Store,
};
use crate::model::Partition;
use azure_data_cosmos::{
    feed::{ContinuationToken, FeedRange, QueryPageIterator},
    options::{ExcludedRegions, FeedOptions, MaxItemCountHint, QueryOptions},
    CosmosError, FeedScope, Query,
};
use futures::StreamExt;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use std::{marker::PhantomData, time::Duration};
use tokio::time::Instant;
use tracing::Instrument;

/// The time limit of a query of several pages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum QueryTimeout {
    /// A deadline for all pages together.
    Until(Deadline),
    /// A time limit for each page. A query that makes progress may continue.
    PerPage(Duration),
}

impl From<Deadline> for QueryTimeout {
    fn from(deadline: Deadline) -> Self {
        Self::Until(deadline)
    }
}

impl QueryTimeout {
    /// The deadline of the next page.
    fn deadline(self) -> Deadline {
        match self {
            Self::Until(deadline) => deadline,
            Self::PerPage(time) => Deadline::after(time),
        }
    }
}

impl Store {
    /// Queries one logical partition and returns all rows. An unreadable document is an error that names it, because
    /// decisions about an instance need all of its documents.
    pub(crate) async fn query_partition<T: DeserializeOwned + Send + 'static>(
        &self,
        partition: &Partition,
        statement: Statement,
        timeout: impl Into<QueryTimeout>,
    ) -> Result<Vec<T>, StoreError> {
        self.partition_pages(partition, statement, timeout)?.collect().await?.complete()
    }

    /// Queries one logical partition page by page, for results that may not fit into memory.
    pub(crate) fn partition_pages<T: DeserializeOwned + Send + 'static>(
        &self,
        partition: &Partition,
        statement: Statement,
        timeout: impl Into<QueryTimeout>,
    ) -> Result<Pages<T>, StoreError> {
        let timeout = timeout.into();
        let call = self.call(OperationKind::PartitionQuery, partition, statement.name(), timeout.deadline());
        self.pages(call, statement, FeedScope::partition(partition), timeout)
    }

    /// Queries the whole container and returns all rows, so the statement must limit them. The caller decides about
    /// unreadable rows: they must not fail a query about other instances.
    pub(crate) async fn query_container<T: DeserializeOwned + Send + 'static>(
        &self,
        statement: Statement,
        timeout: impl Into<QueryTimeout>,
    ) -> Result<Rows<T>, StoreError> {
        self.container_pages(statement, timeout)?.collect().await
    }

    /// Queries the whole container page by page, for results that may not fit into memory, or if the caller may stop
    /// early. Sends nothing before the caller asks for the first page.
    pub(crate) fn container_pages<T: DeserializeOwned + Send + 'static>(
        &self,
        statement: Statement,
        timeout: impl Into<QueryTimeout>,
    ) -> Result<Pages<T>, StoreError> {
        self.pages_across(FeedScope::full_container(), statement, timeout.into())
    }

    pub(super) fn pages_across<T: DeserializeOwned + Send + 'static>(
        &self,
        scope: FeedScope,
        statement: Statement,
        timeout: QueryTimeout,
    ) -> Result<Pages<T>, StoreError> {
        // The SDK does not send `TOP` to the partitions. Without a page size each partition chooses its own.
        debug_assert!(statement.page_size().is_some(), "{} has no page size", statement.name());
        let anywhere = Partition::system("any");
        let call = self.call(OperationKind::ContainerQuery, &anywhere, statement.name(), timeout.deadline());
        self.pages(call, statement, scope, timeout)
    }

    fn pages<T: DeserializeOwned + Send + 'static>(
        &self,
        call: Call,
        statement: Statement,
        scope: FeedScope,
        timeout: QueryTimeout,
    ) -> Result<Pages<T>, StoreError> {
        let call = match statement.request_options() {
            request_options if request_options.is_authoritative() => call.with_options(request_options),
            request_options => call.with_options(request_options).ending_on_session_refusal(),
        };
        let page_size = statement.page_size().map_or(MaxItemCountHint::ServerDecides, MaxItemCountHint::Limit);
        let query = statement.into_query()?;
        let (store, position) = (self.clone(), Position::Start);
        let (range, open, refreshed, row) = (None, None, false, PhantomData);
        Ok(Pages { store, call, timeout, query, scope, range, page_size, open, position, refreshed, row })
    }
}

/// The pages of one query, in order.
pub(crate) struct Pages<T> {
    store: Store,
    call: Call,
    timeout: QueryTimeout,
    query: Query,
    scope: FeedScope,
    /// The physical partitions of the query, if it does not ask all of them.
    range: Option<FeedRange>,
    page_size: MaxItemCountHint,
    /// Whether the list of physical partitions was fetched again after a refused page.
    refreshed: bool,
    /// The SDK's iterator, until one of its pages fails. The SDK parses a page as a whole, so it gets a row type that
    /// can't fail. The store parses each row afterwards.
    open: Option<QueryPageIterator<Box<RawValue>>>,
    position: Position,
    row: PhantomData<fn() -> T>,
}

/// The position after the pages so far.
enum Position {
    Start,
    After(ContinuationToken),
    /// The SDK has no continuation token.
    Unknown,
    End,
}

impl<T: DeserializeOwned + Send + 'static> Pages<T> {
    pub(super) fn of_range(mut self, range: &FeedRange) -> Self {
        self.range = Some(range.clone());
        self
    }

    /// The next page, which may be empty. `None` after the last page.
    pub(crate) async fn next(&mut self) -> Result<Option<Rows<T>>, StoreError> {
        let span = self.call.span.clone();
        let page = self.next_page().instrument(span).await?;
        Ok(page.map(|rows| self.store.read_rows(&self.call, rows)))
    }

    /// Reads pages until it has at least `rows` rows. Also returns whether there may be more.
    pub(crate) async fn at_least(&mut self, rows: usize) -> Result<(Rows<T>, bool), StoreError> {
        let mut found = Rows::default();
        while found.len() < rows {
            // The call after the last page takes no request.
            let Some(page) = self.next().await? else { return Ok((found, false)) };
            found.extend(page);
        }
        Ok((found, true))
    }

    /// All remaining rows.
    pub(crate) async fn collect(mut self) -> Result<Rows<T>, StoreError> {
        let mut rows = Rows::default();
        while let Some(page) = self.next().await? {
            rows.extend(page);
        }
        Ok(rows)
    }

    async fn next_page(&mut self) -> Result<Option<Vec<Box<RawValue>>>, StoreError> {
        self.call.deadline = self.timeout.deadline();
        let mut pause = MIN_PAUSE;
        while !matches!(self.position, Position::End) {
            if self.call.request_options.is_authoritative() && !self.store.inner.regions.is_write_region_known() {
                Box::pin(self.store.find_write_region(self.call.deadline)).await?;
            }
            if matches!((&self.open, &self.position), (None, Position::Unknown)) {
                return Err(self
                    .call
                    .retryable_error("a page failed, and the SDK can't continue after the page before it"));
            }
            self.call.begun = Instant::now();
            let outcome = tokio::time::timeout_at(self.call.deadline.instant(), self.request_page()).await;
            if !matches!(outcome, Ok(Ok(_))) {
                self.open = None;
            }
            let store = self.store.clone();
            let interpreted = store.interpret(&mut self.call, outcome, &mut pause).await;
            let answer = match interpreted {
                Err(StoreError::Rejected { .. }) if !self.refreshed => {
                    Box::pin(self.refresh_partitions()).await?;
                    continue;
                }
                answer => answer.map_err(|error| self.continuation_error(error))?,
            };
            match answer {
                Some(CallOutcome::Response(page)) => match page.origin {
                    Origin::Write => return Ok(page.items),
                    Origin::Other => {}
                    Origin::Excluded => Box::pin(self.find_moved_write_region(&mut pause)).await?,
                },
                Some(CallOutcome::SessionRefused) => {
                    self.call.ends_on_session_refusal = false;
                    self.call.request_options = self.call.request_options.authoritative();
                }
                Some(CallOutcome::Refused(refusal)) => {
                    let detail = format!("the query {} was answered {refusal:?}", self.call.document);
                    return Err(StoreError::Malformed { detail });
                }
                None => {}
            }
        }
        Ok(None)
    }

    /// Requests the page at the current position, once.
    async fn request_page(&mut self) -> Result<Page, CosmosError> {
        let pages = match &mut self.open {
            Some(pages) => pages,
            None => {
                let options = self.options();
                let container = &self.store.inner.container;
                let items = container.query_items(self.query.clone(), self.scope.clone(), Some(options)).await?;
                self.open.insert(items.into_pages())
            }
        };
        let Some(page) = pages.next().await.transpose()? else {
            self.position = Position::End;
            return Ok(Page { items: None, requests: 0, charge: 0.0, origin: Origin::Write });
        };
        let charge = page.headers().request_charge().map_or(0.0, |c| c.value());
        let diagnostics = page.diagnostics();
        let requests = diagnostics.request_count();
        let origin = match self.call.request_options.is_authoritative() {
            true => self.store.inner.regions.origin(&diagnostics),
            false => Origin::Write,
        };
        if origin == Origin::Write {
            self.position = pages.to_continuation_token().map_or(Position::Unknown, Position::After);
        } else {
            // The page does not count. The query requests it again from the same position.
            self.open = None;
        }
        Ok(Page { items: Some(page.into_items()), requests, charge, origin })
    }

    /// Finds the write region again, because a region answered that was excluded. The write region may have moved.
    async fn find_moved_write_region(&mut self, pause: &mut Duration) -> Result<(), StoreError> {
        self.store.find_write_region(self.call.deadline).await?;
        self.store.pause(pause, None, self.call.deadline).await;
        if self.call.deadline.passed() {
            return Err(self.call.retryable_error("another region answered instead of the write region"));
        }
        Ok(())
    }

    fn options(&self) -> QueryOptions {
        let feed =
            FeedOptions::default().with_max_item_count(self.page_size).with_max_fan_out(self.store.inner.max_fan_out);
        let mut operation = self.call.options();
        if self.call.request_options.is_authoritative() {
            let excluded = self.store.inner.regions.excluded().into_iter();
            operation.excluded_regions = Some(excluded.fold(ExcludedRegions::new(), ExcludedRegions::with_region));
        }
        let options = QueryOptions::default().with_operation_options(operation).with_feed_options(feed);
        match &self.position {
            Position::After(token) => options.with_continuation_token(token.clone()),
            _ => options,
        }
    }

    /// Fetches the list of physical partitions again. A partition that was merged with another answers 400, and the SDK
    /// keeps its old list. So a 400 proves a wrong query only with a current list.
    async fn refresh_partitions(&mut self) -> Result<(), StoreError> {
        self.refreshed = true;
        let partitions = self.store.refresh_partitions(self.call.deadline).await?;
        match &self.range {
            Some(range) if !partitions.contains(range) => {
                let detail = format!("the partitions of the query {} were merged or split", self.call.document);
                Err(StoreError::PartitionsChanged { detail })
            }
            _ => Ok(()),
        }
    }

    /// The error for a page after the first. The service accepted the query itself, so a refusal concerns its
    /// continuation, for example because partitions were merged meanwhile. The same query from the start succeeds.
    fn continuation_error(&self, error: StoreError) -> StoreError {
        match (&self.position, error) {
            (Position::After(_), StoreError::Rejected { detail, .. }) => self.call.retryable_error(&detail),
            (_, error) => error,
        }
    }
}

/// One page, or the end.
struct Page {
    items: Option<Vec<Box<RawValue>>>,
    requests: usize,
    charge: f64,
    origin: Origin,
}

impl Response for Page {
    fn requests(&self) -> usize {
        self.requests
    }

    fn charge(&self) -> f64 {
        self.charge
    }
}
