//! Pages of queries.

use std::time::Duration;

use azure_core::http::headers::HeaderName;
use azure_core::Bytes;
use serde_json::{json, Value};

use crate::answer::{Answer, Lost};
use crate::conduct::Conduct;
use crate::misbehaviour::Misbehaviour;
use crate::ranges::MergedRanges;
use crate::request::{header, read_json, Outgoing, CONTINUATION};
use crate::service::Service;

const ITEM_COUNT: HeaderName = HeaderName::from_static("x-ms-item-count");

/// Marks the continuation of an empty page; the page that it leads to begins where the rest says.
const AFTER_EMPTY_PAGE: &str = "after-empty-page:";

/// Answers a page of a query.
pub(crate) async fn answer(
    service: &Service,
    merged: &MergedRanges,
    request: &Outgoing,
    conduct: &Conduct,
) -> Result<Answer, Lost> {
    pause(conduct.page_time()).await;
    if let Some(refusal) = merged.refusal(service, request).await {
        return Ok(refusal);
    }
    let continuation = header(&request.headers, &CONTINUATION);
    if let Some(begin) = continuation.and_then(|token| token.strip_prefix(AFTER_EMPTY_PAGE)) {
        return service.forward(&resume(request, begin)).await;
    }
    let mut answer = service.forward(request).await?;
    if answer.is_success() && conduct.is(&Misbehaviour::EmptyPages) {
        let next = format!("{AFTER_EMPTY_PAGE}{}", continuation.unwrap_or_default());
        empty(&mut answer, next);
    }
    Ok(answer)
}

/// The same query from where the empty page stands.
fn resume(request: &Outgoing, begin: &str) -> Outgoing {
    let mut request = request.clone();
    if begin.is_empty() {
        request.headers.remove(CONTINUATION);
    } else {
        request.headers.insert(CONTINUATION, begin.to_owned());
    }
    request
}

/// Takes the rows out of a page.
fn empty(answer: &mut Answer, next: String) {
    let rid = read_json(&answer.body).and_then(|body| body.get("_rid").cloned()).unwrap_or(Value::Null);
    answer.body = Bytes::from(json!({ "_rid": rid, "Documents": [], "_count": 0 }).to_string());
    answer.headers.insert(ITEM_COUNT, "0");
    answer.headers.insert(CONTINUATION, next);
}

/// Sleeps, but not at all for no time: a timer of zero still yields.
pub(crate) async fn pause(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}
