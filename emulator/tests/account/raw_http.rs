//! Plain HTTP/1.1, for requests that the SDK never sends.

use azure_core::credentials::Secret;
use azure_core::hmac::hmac_sha256;
use duroxide_cosmos_emulator::Served;
use percent_encoding::{utf8_percent_encode, NON_ALPHANUMERIC};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const DATE: &str = "Thu, 27 Apr 2017 00:51:12 GMT";

/// Sends a request and returns the status and the body. There is no status if the server closed the connection.
pub async fn send(
    served: &Served,
    method: &str,
    path: &str,
    headers: &[(&str, String)],
    body: &str,
) -> (Option<u16>, String) {
    let mut request = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\n", served.addr());
    for (name, value) in headers {
        request += &format!("{name}: {value}\r\n");
    }
    request += &format!("connection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let mut stream = TcpStream::connect(served.addr()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = Vec::new();
    stream.read_to_end(&mut response).await.unwrap();
    let response = String::from_utf8(response).unwrap();
    let status = response.split(' ').nth(1).and_then(|text| text.parse().ok());
    let body = response.split_once("\r\n\r\n").map(|(_, body)| body);
    (status, body.unwrap_or_default().to_owned())
}

/// Returns the headers that sign a request with an account key.
pub fn signed(key: &str, verb: &str, kind: &str, link: &str) -> Vec<(&'static str, String)> {
    let text = format!("{verb}\n{kind}\n{link}\n{}\n\n", DATE.to_lowercase());
    let signature = hmac_sha256(&text, &Secret::new(key.to_owned())).unwrap();
    let header = format!("type=master&ver=1.0&sig={signature}");
    let header = utf8_percent_encode(&header, NON_ALPHANUMERIC).to_string();
    vec![("authorization", header), ("x-ms-date", DATE.to_owned())]
}
