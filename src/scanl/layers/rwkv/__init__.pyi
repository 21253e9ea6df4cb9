from scanl.layers.rwkv.aft import AFT as AFT
from scanl.layers.rwkv.aft import AFTConv as AFTConv
from scanl.layers.rwkv.aft import AFTFull as AFTFull
from scanl.layers.rwkv.aft import AFTLocal as AFTLocal
from scanl.layers.rwkv.aft import AFTSimple as AFTSimple
from scanl.layers.rwkv.rwkv4 import RWKV4 as RWKV4
from scanl.layers.rwkv.rwkv6 import RWKV6 as RWKV6
from scanl.layers.rwkv.rwkv7 import RWKV7 as RWKV7
