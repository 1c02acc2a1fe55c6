//! Answers pages of queries, with the misbehaviours that affect them.

use std::time::Duration;

use azure_core::http::headers::HeaderName;
use azure_core::Bytes;
use serde_json::{json, Value};

use crate::active_misbehaviours::ActiveMisbehaviours;
use crate::answer::{Answer, NoAnswer};
use crate::misbehaviour::Misbehaviour;
use crate::partition_ranges::MergedRanges;
use crate::request::{header, read_json, Outgoing, CONTINUATION};
use crate::service::Service;

const ITEM_COUNT: HeaderName = HeaderName::from_static("x-ms-item-count");

/// The prefix of the continuation of an inserted empty page. The rest is the continuation of the real page.
const AFTER_EMPTY_PAGE: &str = "after-empty-page:";

/// Answers a page of a query.
pub(crate) async fn answer(
    service: &Service,
    merged_ranges: &MergedRanges,
    request: &Outgoing,
    misbehaviours: &ActiveMisbehaviours,
) -> Result<Answer, NoAnswer> {
    pause(misbehaviours.page_time()).await;
    if let Some(refusal) = merged_ranges.refusal(service, request).await {
        return Ok(refusal);
    }
    let continuation = header(&request.headers, &CONTINUATION);
    if let Some(begin) = continuation.and_then(|token| token.strip_prefix(AFTER_EMPTY_PAGE)) {
        return service.forward(&resume(request, begin)).await;
    }
    let mut answer = service.forward(request).await?;
    if answer.is_success() && misbehaviours.is(&Misbehaviour::EmptyPages) {
        let next = format!("{AFTER_EMPTY_PAGE}{}", continuation.unwrap_or_default());
        empty(&mut answer, next);
    }
    Ok(answer)
}

/// Returns the query with the continuation of the real page after an inserted empty page.
fn resume(request: &Outgoing, begin: &str) -> Outgoing {
    let mut request = request.clone();
    if begin.is_empty() {
        request.headers.remove(CONTINUATION);
    } else {
        request.headers.insert(CONTINUATION, begin.to_owned());
    }
    request
}

/// Removes the rows of a page and sets its continuation.
fn empty(answer: &mut Answer, next: String) {
    let rid = read_json(&answer.body).and_then(|body| body.get("_rid").cloned()).unwrap_or(Value::Null);
    answer.body = Bytes::from(json!({ "_rid": rid, "Documents": [], "_count": 0 }).to_string());
    answer.headers.insert(ITEM_COUNT, "0");
    answer.headers.insert(CONTINUATION, next);
}

/// Sleeps. It returns at once for a zero duration, because even a timer of zero yields.
pub(crate) async fn pause(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}
